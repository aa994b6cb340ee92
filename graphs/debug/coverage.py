"""Which graph every step of a run replayed, or why none, and what each graph cost."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import groupby

from graphs.debug.keys import cells, label
from graphs.store import GraphStore, LedgerLine


@dataclass(frozen=True)
class Stretch:
    """Successive steps with the same key and the same fate."""

    start: int
    count: int
    key: Hashable
    off_graph: str  # the reason; "" where a graph was replayed

    @property
    def last(self) -> int:
        return self.start + self.count - 1


@dataclass(frozen=True)
class Coverage:
    """What became of the steps of one store, and of its graphs."""

    timeline: tuple[tuple[Hashable, str], ...]  # per step the key, and why it left the graph or ""
    ledger: tuple[LedgerLine, ...]
    never_replayed: tuple[Hashable, ...]

    @staticmethod
    def of(store: GraphStore) -> Coverage:
        """So far; of the steps those that the store remembers."""
        return Coverage(tuple(store.timeline), tuple(store.ledger()), tuple(store.never_replayed()))

    @property
    def num_on_graph(self) -> int:
        return sum(not reason for _, reason in self.timeline)

    @property
    def pool_bytes(self) -> int:
        """Memory that belongs to single graphs."""
        return sum(line.pool_bytes for line in self.ledger)

    @property
    def static_bytes(self) -> int:
        """Memory of the buffers that all graphs share."""
        return self.ledger[0].static_bytes if self.ledger else 0

    def stretches(self) -> Iterator[Stretch]:
        start = 0
        for (key, reason), group in groupby(self.timeline):
            count = len(list(group))
            yield Stretch(start, count, key, reason)
            start += count

    def timeline_lines(self) -> Iterator[str]:
        """Text, a line per stretch."""
        width = max((len(label(key)) for key, _ in self.timeline), default=0)
        for stretch in self.stretches():
            what = f"off graph: {stretch.off_graph}" if stretch.off_graph else "replay"
            yield f"steps {stretch.start:>5}..{stretch.last:<5} {label(stretch.key):<{width}} {what}"

    def ledger_lines(self) -> Iterator[str]:
        """Text, a heading and a line per graph."""
        rows = [ledger_cells(line) for line in self.ledger]
        headings = list(rows[0]) if rows else []
        width = {heading: max(len(heading), *(len(row[heading]) for row in rows)) for heading in headings}
        yield "  ".join(heading.rjust(width[heading]) for heading in headings)
        yield from ("  ".join(row[heading].rjust(width[heading]) for heading in headings) for row in rows)


def seconds_per_replay(line: LedgerLine) -> float:
    return line.launch_seconds / max(1, line.num_replays)


def ledger_cells(line: LedgerLine) -> dict[str, str]:
    """One graph in a table: heading -> cell."""
    return {
        **{heading: str(cell) for heading, cell in cells(line.key).items()},
        "replays": str(line.num_replays),
        "capture s": f"{line.capture_seconds:.2f}",
        "ops": str(line.num_ops or ""),
        "pool KiB": str(line.pool_bytes // 1024),
        "ms/replay": f"{1e3 * seconds_per_replay(line):.2f}",
    }
