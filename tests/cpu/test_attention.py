"""Paged attention equals a dense float64 computation, and nothing outside a sequence can reach its result."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import accumulate, pairwise

import pytest
import torch

import attention.reference
from attention import AttentionSpec, AttnInputs, ReferenceBackend
from attention.reference import BLOCK_TOKENS

ATTEND = ReferenceBackend().attend


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
ALL_CASES = pytest.mark.parametrize(("case", "packed"), [*((c, False) for c in DECODES), *((c, 1) for c in PREFILLS)])
BOTH_LAYOUTS = pytest.mark.parametrize("packed", [False, True])


@ALL_CASES
def test_decode_and_packed_prefill_equal_dense_float64(case: Case, packed: bool) -> None:
    Launch(case).check(packed=packed)


@BOTH_LAYOUTS
def test_random_cases_on_random_pages_equal_dense_float64(packed: bool) -> None:
    rng = random.Random(5)
    for seed in range(40):
        rows, width, kv_heads = rng.randint(2, 4), rng.randint(1, 7), rng.randint(1, 2)
        queries = tuple(rng.randint(1, 24) if packed else width for _ in range(rows))
        lengths = tuple(q + rng.choice((0, 1, rng.randint(0, 40), rng.randint(0, 700))) for q in queries)
        heads, page, dim = kv_heads * rng.randint(1, 3), rng.choice((1, 4, 8, 16, 48)), rng.choice((64, 96, 128, 256))
        window, softcap = rng.choice((None, rng.randint(1, 30), rng.randint(1, 600))), rng.choice((None, 4.0))
        Launch(Case(queries, lengths, page, heads, kv_heads, dim, window, softcap), seed).check(packed=packed)


@ALL_CASES
def test_what_no_sequence_owns_changes_nothing(case: Case, packed: bool) -> None:
    """NaN in unused pages, in unused places of used pages and in the scratch page: bit-equal results and stores."""
    clean, poisoned = Launch(case, junk=0.0), Launch(case, junk=math.nan)
    assert torch.equal(torch.cat(clean.run(packed=packed)), torch.cat(poisoned.run(packed=packed)))
    assert torch.equal(clean.cache, poisoned.cache.nan_to_num(nan=0.0))


@pytest.mark.parametrize("case", PREFILLS)
def test_packing_rows_equals_running_them_one_by_one(case: Case) -> None:
    packed, alone = Launch(case, junk=0.0), Launch(case, junk=0.0)
    together = packed.run(packed=True)
    tables, lens, starts, mapping, _ = alone.inputs
    for row, (a, b) in enumerate(pairwise(starts.tolist())):
        query, key, value = (t[:, :, a:b] for t in alone.tensors(packed=True))
        inputs = AttnInputs(tables[row : row + 1], lens[row : row + 1], starts[row : row + 2] - a, mapping[a:b])
        assert torch.equal(ATTEND(query, key, value, alone.cache, inputs, alone.spec)[0], together[row])
    assert torch.equal(packed.cache, alone.cache)


def test_a_packed_row_sees_pages_that_another_row_of_the_launch_stores() -> None:
    """Prefix sharing inside one launch: every row is stored before any row attends."""
    launch = Launch(Case((5, 16), (21, 16)))
    launch.tables[0, :2] = launch.tables[1, :2]  # the second row stores the first two pages of the first
    shared = torch.cat((launch.kv[1], launch.kv[0][:, 16:]), dim=1)
    assert_dense(launch.run(packed=True)[0], launch.query[0], shared, launch.spec)


@pytest.mark.parametrize("page", [2, 8])
def test_padding_rows_are_finite_and_real_rows_do_not_feel_them(page: int) -> None:
    results = []
    for seed in (1, 2):  # the same real rows beside different padding
        launch = Launch(Case((4, 4), (30, 4), page=page, window=20))
        torch.manual_seed(seed)
        query, key, value = (torch.cat((t, torch.randn(2, *t.shape[1:]))) for t in launch.tensors(packed=False))
        tables, lens, _, mapping, _ = launch.inputs
        tables = torch.cat((tables, torch.full_like(tables, launch.scratch)))
        mapping = torch.cat((mapping, (launch.scratch * page + torch.arange(4) % page).repeat(2)))
        starts = torch.arange(0, 17, 4, dtype=torch.int32)
        inputs = AttnInputs(tables, torch.cat((lens, torch.full_like(lens, 4))), starts, mapping)
        out = ATTEND(query, key, value, launch.cache, inputs, launch.spec)
        assert torch.isfinite(out).all()
        assert_dense(out[0], launch.query[0], launch.kv[0], launch.spec)
        results.append(torch.cat((out[:2].flatten(), launch.cache[: launch.scratch].nan_to_num(nan=0.0).flatten())))
    assert torch.equal(*results)


@BOTH_LAYOUTS
def test_block_table_entries_past_the_longest_sequence_are_never_read(packed: bool) -> None:
    launch = Launch(Case((3, 3), (15, 16)))  # two pages each
    launch.tables[:, 2:] = 10**6
    launch.check(packed=packed)


@BOTH_LAYOUTS
def test_bfloat16_is_close_to_float64_on_the_same_values(packed: bool) -> None:
    launch = Launch(Case((3, 3), (60, 600), page=16, window=300, softcap=8.0), dtype=torch.bfloat16)
    launch.check(packed=packed, tolerance=1e-2)
    assert launch.run(packed=packed)[0].dtype == torch.bfloat16


@BOTH_LAYOUTS
def test_the_op_passes_opcheck(packed: bool) -> None:
    launch = Launch(Case((3, 3), (3, 17), window=9), junk=0.0)
    args = (*launch.tensors(packed=packed), launch.cache, *launch.inputs, *launch.spec)
    torch.library.opcheck(torch.ops.paged_attention.reference.default, args)


def test_compiled_calls_mutate_the_cache_in_place_and_equal_eager() -> None:
    eager, compiled = Launch(DECODES[1]), Launch(DECODES[1])

    def twice(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        first = ATTEND(query, key, value, cache, eager.inputs, eager.spec)
        return first + ATTEND(query, key + 1, value * 2, cache, eager.inputs, eager.spec)

    expected = twice(*eager.tensors(packed=False), eager.cache)
    run = torch.compile(twice, fullgraph=True, backend="aot_eager")
    assert torch.equal(run(*compiled.tensors(packed=False), compiled.cache), expected)
    assert torch.equal(compiled.cache.nan_to_num(), eager.cache.nan_to_num())


@ALL_CASES
def test_without_a_look_at_the_lengths_the_results_are_the_same(
    case: Case, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a CUDA graph has to do: visit every column of the block tables and leave the rest to the mask."""
    monkeypatch.setattr(attention.reference, "_page_range", lambda lens, length, window, page, width: (0, width))
    Launch(case).check(packed=packed)
