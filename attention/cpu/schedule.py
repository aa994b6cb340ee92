"""What the layers of a step share on the CPU: which tokens are gathered, in which chunks, and what each query sees.

Made on the host, which may read the lengths on the CPU: only the opaque ops of `torch_backend.py` call this.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attention.backend import AttentionShape

CHUNK_TOKENS = 512  # keys of a chunk, unless no row has as many
GROUP_BYTES = 3 << 20  # K and V gathered at once; they should still be in a cache when they are used
HIDDEN = -1e30  # finite, so that a chunk in which a query sees nothing gets a weight of zero and not NaN

Ints = npt.NDArray[np.int64]


class Group(NamedTuple):
    """Chunks that are gathered and attended together: E of them, C keys each."""

    rows: torch.Tensor | None  # [E] row of each chunk; None: chunk r is all of row r
    tokens: torch.Tensor  # [E * Hkv * 2 * C] what to gather, as rows of the cache seen as [tokens, D]
    mask: torch.Tensor  # [E * Hkv, 1, G * L, C] float32, added to the scores


class Schedule(NamedTuple):
    """How the rows of a decode step are attended under one window."""

    groups: tuple[Group, ...]
    chunks: int  # E over all groups
    most: int  # chunks of the row that has most
    parts: torch.Tensor | None  # [R * most] the chunks of each row, padded with E; None: each row has `most`


class PromptChunk(NamedTuple):
    """Tokens `start : end` of a packed prefill, under one window."""

    start: int
    end: int
    tokens: torch.Tensor | None  # [Hkv * 2 * N] what to gather; None: it sees its own K and V and no others
    mask: torch.Tensor | None  # [L, N] float32, added to the scores; None: causal


class Places:
    """The cache of a layer seen as `[tokens, D]`: where the K and V of a token are in it."""

    def __init__(self, shape: AttentionShape) -> None:
        heads, self._page_size = shape.num_kv_heads, shape.page_size
        self._skip = (2 * heads - 1) * self._page_size  # between the places of one head in two pages
        self._offsets = np.arange(2 * heads).reshape(2, heads) * self._page_size  # of K and V, by head

    def stored(self, slots: Ints) -> Ints:
        """`[R, L]` slots of new tokens -> `[2, R, Hkv, L]`, K and V."""
        first = slots + slots // self._page_size * self._skip
        return first[:, None] + self._offsets[:, None, :, None]

    def gathered(self, tables: Ints, rows: Ints, positions: Ints) -> torch.Tensor:
        """`positions` `[E, C]` of rows `rows` `[E]` of `tables` -> `[E * Hkv * 2 * C]`: K and V of a head lie together,
        where one thread uses them."""
        pages = positions // self._page_size
        first = (tables[rows[:, None], pages] * (self._skip + self._page_size)) + positions - pages * self._page_size
        return torch.from_numpy((first[:, None, None] + self._offsets.T[:, :, None]).ravel())


def decode_schedule(shape: AttentionShape, tables: Ints, lens: Ints, query_len: int, window: int | None) -> Schedule:
    """For rows of `lens` `[R]` tokens on pages `tables` `[R, P]`, the last `query_len` of which are new."""
    oldest = lens - query_len
    first = np.zeros_like(lens) if window is None else np.maximum(oldest - window + 1, 0)
    spans = lens - first
    width = min(CHUNK_TOKENS, int(spans.max()))
    counts = -(-spans // width)  # chunks of each row
    ends = np.cumsum(counts)
    rows = np.repeat(np.arange(len(lens)), counts)  # [E]
    begin = first[rows] + (np.arange(len(rows)) - (ends - counts)[rows]) * width
    most, size = int(counts.max()), max(1, GROUP_BYTES // (2 * shape.num_kv_heads * width * shape.head_dim * 4))
    places, whole, groups = Places(shape), most == 1 and len(rows) <= size, []
    for start in range(0, len(rows), size):
        row = rows[start : start + size]
        position, old = begin[start : start + size, None] + np.arange(width), oldest[row, None]
        visible = _visible(old + np.arange(query_len), position, window)
        inside = np.where(position < lens[row, None], position, old)  # what lies behind may be anything, so NaN
        tokens = places.gathered(tables, row, inside)
        groups.append(Group(None if whole else torch.from_numpy(row), tokens, _folded_mask(visible, shape)))
    uniform = len(rows) == most * len(lens)
    return Schedule(tuple(groups), len(rows), most, None if uniform else _parts(counts, ends))


def prompt_chunk(
    shape: AttentionShape, table: Ints, length: int, start: int, end: int, window: int | None
) -> PromptChunk:
    """For tokens `start : end` of a packed prefill, the last of a sequence of `length` tokens on pages `table`."""
    oldest = length - (end - start)
    first = 0 if window is None else max(0, oldest - window + 1)
    capped = any(spec.softcap is not None for spec in shape.specs)
    if oldest == 0 and (window is None or window >= length) and not capped:
        return PromptChunk(start, end, None, None)
    position = np.arange(first, length)
    visible = _visible(np.arange(oldest, length)[None], position[None], window)[0]
    tokens = Places(shape).gathered(table[None], np.zeros(1, np.int64), position[None])
    return PromptChunk(start, end, tokens, _additive(visible))


def _visible(query: Ints, key: Ints, window: int | None) -> npt.NDArray[np.bool_]:
    """`[E, L, C]`: whether the query at position `query` `[E, L]` sees the key at position `key` `[E, C]`."""
    query, key = query[:, :, None], key[:, None]
    seen: npt.NDArray[np.bool_] = key <= query
    return seen if window is None else seen & (key > query - window)


def _additive(visible: npt.NDArray[np.bool_]) -> torch.Tensor:
    return torch.from_numpy(np.where(visible, np.float32(0), np.float32(HIDDEN)))


def _folded_mask(visible: npt.NDArray[np.bool_], shape: AttentionShape) -> torch.Tensor:
    """`[E, L, C]` -> `[E * Hkv, 1, G * L, C]`, for the query heads of a group folded into the query axis."""
    chunks, length, width = visible.shape
    mask = _additive(visible).view(chunks, 1, 1, length, width)
    mask = mask.expand(chunks, shape.num_kv_heads, shape.group, length, width)
    return mask.reshape(chunks * shape.num_kv_heads, 1, shape.group * length, width)


def _parts(counts: Ints, ends: Ints) -> torch.Tensor:
    part = np.arange(counts.max())
    chunk = (ends - counts)[:, None] + part
    return torch.from_numpy(np.where(part < counts[:, None], chunk, ends[-1]).ravel())
