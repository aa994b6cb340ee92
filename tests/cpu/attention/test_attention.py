"""Paged attention equals a dense float64 computation, and nothing outside a sequence can reach its result."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import torch
from paged_launch import ATTEND, DECODES, PREFILLS, Case, Launch, assert_dense, random_case

import attention.reference
from attention import AttnInputs

ALL_CASES = pytest.mark.parametrize(("case", "packed"), [*((c, False) for c in DECODES), *((c, 1) for c in PREFILLS)])
BOTH_LAYOUTS = pytest.mark.parametrize("packed", [False, True])


@ALL_CASES
def test_decode_and_packed_prefill_equal_dense_float64(case: Case, packed: bool) -> None:
    Launch(case).check(packed=packed)


@BOTH_LAYOUTS
def test_random_cases_on_random_pages_equal_dense_float64(packed: bool) -> None:
    rng = random.Random(5)
    for seed in range(40):
        Launch(random_case(rng, rng.randint(2, 4), packed=packed), seed).check(packed=packed)


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
