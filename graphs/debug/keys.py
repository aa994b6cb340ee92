"""How keys of graphs are shown: a `GraphKey` by what tells graphs of one owner apart, any other key as it prints."""

from __future__ import annotations

from collections.abc import Hashable

from graphs.key import GraphKey


def label(key: Hashable) -> str:
    """In a line of text."""
    return f"{key.rows} rows, k = {key.num_draft}, {key.sampler}" if isinstance(key, GraphKey) else str(key)


def cells(key: Hashable) -> dict[str, object]:
    """In a table: heading -> cell."""
    if isinstance(key, GraphKey):
        return {"rows": key.rows, "k": key.num_draft, "sampler": key.sampler}
    return {"key": key}


def tone(key: Hashable) -> tuple[int, str]:
    """What shares a colour, in the order of colours, and its name: graphs of as many rows."""
    return (key.rows, f"{key.rows} rows") if isinstance(key, GraphKey) else (0, str(key))
