"""Launches of paged attention with random contents on random pages, and textbook attention to compare them with."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

import pytest
import torch

from attention import AttentionSpec, AttnInputs, NoNativeError, ReferenceBackend
from attention.reference import BLOCK_TOKENS

ATTEND = ReferenceBackend().attend
T = TypeVar("T")


def or_skip(make: Callable[[], T]) -> T:
    """What `make` gives; the test is skipped where it needs a C++ compiler and there is none."""
    try:
        return make()
    except NoNativeError as error:
        pytest.skip(str(error))


@dataclass(frozen=True)
class Case:
    """Rows of `queries[r]` new tokens at the end of sequences of `lengths[r]` tokens."""

    queries: tuple[int, ...]
    lengths: tuple[int, ...]
    page: int = 8
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    window: int | None = None
    softcap: float | None = None


def random_case(rng: random.Random, rows: int, *, packed: bool) -> Case:
    """Any shape, lengths at and between page edges; decode rows of one width, or packed chunks of different ones."""
    width, kv_heads = rng.randint(1, 7), rng.randint(1, 2)
    queries = tuple(rng.randint(1, 24) if packed else width for _ in range(rows))
    lengths = tuple(q + rng.choice((0, 1, rng.randint(0, 40), rng.randint(0, 700))) for q in queries)
    heads, page, dim = kv_heads * rng.randint(1, 3), rng.choice((1, 4, 8, 16, 48)), rng.choice((64, 96, 128, 256))
    window, softcap = rng.choice((None, rng.randint(1, 30), rng.randint(1, 600))), rng.choice((None, 4.0))
    return Case(queries, lengths, page, heads, kv_heads, dim, window, softcap)


class Launch:
    """A case with random contents on random pages. Every place no sequence owns holds `junk`; the last page is the
    scratch page, which padding rows and unused table entries point at."""

    def __init__(self, case: Case, seed: int = 0, junk: float = math.nan, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(seed)
        self.case, self.spec = case, AttentionSpec(case.dim**-0.5, case.window, case.softcap)
        need = [-(-n // case.page) for n in case.lengths]
        self.scratch = sum(need) + 2  # two pages belong to nobody
        order = torch.randperm(self.scratch).tolist()
        self.tables = torch.full((len(need), max(need) + 2), self.scratch, dtype=torch.int32)
        self.cache = torch.full((self.scratch + 1, 2, case.kv_heads, case.page, case.dim), junk, dtype=dtype)
        self.query, self.kv, mapping = [], [], []
        for row, (q, n) in enumerate(zip(case.queries, case.lengths, strict=True)):
            own = torch.tensor([order.pop() for _ in range(need[row])])
            self.tables[row, : len(own)] = own
            self.query.append(torch.randn(q, case.heads, case.dim).to(dtype))
            self.kv.append(torch.randn(2, n, case.kv_heads, case.dim).to(dtype))
            page, offset = own[torch.arange(n) // case.page], torch.arange(n) % case.page
            self.cache[page[: n - q], :, :, offset[: n - q]] = self.kv[row][:, : n - q].transpose(0, 1)
            mapping.append((page * case.page + offset)[n - q :])
        starts = torch.tensor([0, *accumulate(case.queries)], dtype=torch.int32)
        lens = torch.tensor(case.lengths, dtype=torch.int32)
        self.inputs = AttnInputs(self.tables, lens, starts, torch.cat(mapping))

    def tensors(self, *, packed: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value in the layout of the op: one row of packed tokens, or rows."""
        new = [kv[:, kv.shape[1] - q :] for kv, q in zip(self.kv, self.case.queries, strict=True)]
        query = torch.cat(self.query).unsqueeze(0) if packed else torch.stack(self.query)
        key, value = torch.cat(new, dim=1).unsqueeze(1) if packed else torch.stack(new, dim=1)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def run(self, *, packed: bool) -> list[torch.Tensor]:
        """Store and attend once; the result `[q, Hq, D]` of each row."""
        out = ATTEND(*self.tensors(packed=packed), self.cache, self.inputs, self.spec).flatten(0, 1)
        return [out[a:b] for a, b in pairwise(self.inputs.query_start.tolist())]

    def check(self, *, packed: bool, tolerance: float = 1e-5) -> None:
        for row, out in enumerate(self.run(packed=packed)):
            assert_dense(out, self.query[row], self.kv[row], self.spec, tolerance)


def assert_dense(
    out: torch.Tensor, query: torch.Tensor, kv: torch.Tensor, spec: AttentionSpec, tolerance: float = 1e-5
) -> None:
    """`out` is textbook attention of one row in float64: no pages, no blocks, one head at a time."""
    length, total, group = len(query), kv.shape[1], query.shape[1] // kv.shape[2]
    i, j = torch.arange(total - length, total).view(-1, 1), torch.arange(total).view(1, -1)
    hidden = (j > i) | (i - j >= (spec.window or total))
    for head in range(query.shape[1]):
        key, value = kv[:, :, head // group].double()
        scores = query[:, head].double() @ key.T * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        expected = scores.masked_fill(hidden, -math.inf).softmax(-1) @ value
        torch.testing.assert_close(out[:, head].double(), expected, atol=tolerance, rtol=tolerance)


LONG = BLOCK_TOKENS + 37
DECODES = [
    Case((1, 1, 1), (8, 9, 1)),  # on a page's edge, and one past it
    Case((4, 4, 4, 4), (4, 16, 17, 5), dim=96),
    Case((6, 6), (6, 40), page=4, dim=128),  # more new tokens than a page holds
    Case((5, 5, 5), (5, LONG, 33), page=16),  # several blocks, most rows end in the first
    Case((3, 3), (2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1), page=16),  # on a block's edge, and one past it
    Case((2, 2), (700, 3), page=24, window=19),  # a page size that does not divide a block; whole blocks hidden
    Case((4, 4), (LONG, 60), page=16, window=8, softcap=5.0, heads=8, kv_heads=1, dim=256),
    Case((4, 4), (4, 30), heads=9, kv_heads=3, window=1),  # a token sees itself only
    Case((2,), (50,), page=1, softcap=2.0, heads=6, kv_heads=6, dim=96),
    Case((2, 2), (300, 20), page=1024, window=100),  # one page is larger than a block
]
PREFILLS = [
    Case((7, 1, 20), (7, 30, 21)),
    Case((16, 8, 9), (16, 8, 17), dim=96, softcap=3.0),
    Case((30, 5), (LONG, 600), page=16, window=40),
    Case((2, 2, 2), (2, 12, 5), window=3, heads=4, kv_heads=4, dim=128),  # equal lengths, still packed
    Case((33,), (33,), page=16, dim=256, heads=2, kv_heads=1),
]
