"""The CPU backends, on torch and in C++: dense float64, poison, one record for every length, what layers share."""

from __future__ import annotations

import gc
import math
import random
import weakref
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from paged_launch import DECODES, PREFILLS, Case, Launch, assert_dense, or_skip, random_case

import attention.cpu.schedule
from attention import (
    AttentionBackend,
    AttentionShape,
    AttentionSpec,
    AttnInputs,
    Bucket,
    CpuBackend,
    NativeBackend,
    ReferenceBackend,
)
from attention.cpu.schedule import CHUNK_TOKENS
from attention.cpu.torch_backend import CAPPED_QUERIES
from graphs import PersistentBuffers, capture, compare_replay
from graphs import create_backend as create_graphs

Create = Callable[[AttentionShape], AttentionBackend]

RAGGED = [
    Case((1,), (1,), page=16),
    Case((1, 1, 1, 1), (CHUNK_TOKENS, 1, CHUNK_TOKENS + 1, 2 * CHUNK_TOKENS), page=16),  # edges of chunks
    Case((3, 3, 3), (2 * CHUNK_TOKENS + 1, 3, 3 * CHUNK_TOKENS), page=48),  # new tokens in two chunks
    Case((2, 2, 2, 2), (3000, 2, 700, 17), page=16, window=600),
    Case((5, 5), (2 * CHUNK_TOKENS + 2, 5), page=16, window=CHUNK_TOKENS, softcap=3.0),  # a chunk that some do not see
    Case((1,) * 40, tuple(range(1, 1600, 40)), page=16, heads=9, kv_heads=3),  # several groups
    Case((2, 2), (30, 5), page=3, heads=3, kv_heads=1, dim=20, window=7),  # heads that are no whole vectors
]
PROMPTS = [
    Case((2 * CAPPED_QUERIES + 3, 5), (2 * CAPPED_QUERIES + 3, 50), softcap=2.0),
    Case((70, 1, 1), (70, 1, 60), window=8),
    Case((40, 40), (40, 40), window=40),  # the window is no bound
]
CASES = pytest.mark.parametrize(
    ("case", "packed"), [*((c, False) for c in DECODES + RAGGED), *((c, True) for c in PREFILLS + PROMPTS)]
)
BOTH_LAYOUTS = pytest.mark.parametrize("packed", [False, True])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def shape_for(launch: Launch, *specs: AttentionSpec) -> AttentionShape:
    case, cpu = launch.case, torch.device("cpu")
    return AttentionShape(
        case.heads, case.kv_heads, case.dim, case.page, launch.tables.shape[1], launch.cache.dtype, cpu,
        specs or (launch.spec,),
    )  # fmt: skip


def inputs_of(launch: Launch, *, packed: bool) -> AttnInputs:
    return launch.inputs if packed else launch.inputs._replace(query_len=launch.case.queries[0])


@pytest.fixture(params=["torch", "native"])
def create(request: pytest.FixtureRequest) -> Create:
    """Of both backends, one after the other."""
    if request.param == "torch":
        return CpuBackend
    return lambda shape: or_skip(NativeBackend)


def backend_for(create: Create, launch: Launch, *, packed: bool) -> AttentionBackend:
    """Planned, and prepared for this launch."""
    backend, inputs = create(shape_for(launch)), inputs_of(launch, packed=packed)
    if packed:
        backend.plan_prefill(inputs.block_tables, inputs.seq_lens, inputs.query_start)
    else:
        backend.plan([Bucket(len(launch.query), inputs.query_len)], launch.tables)
        backend.prepare(inputs)
    return backend


def run(create: Create, launch: Launch, *, packed: bool) -> list[torch.Tensor]:
    """Store and attend once; the result `[q, Hq, D]` of each row."""
    backend, inputs = backend_for(create, launch, packed=packed), inputs_of(launch, packed=packed)
    out = backend.attend(*launch.tensors(packed=packed), launch.cache, inputs, launch.spec)
    assert out.is_contiguous()
    assert out.dtype == launch.cache.dtype
    flat = out.flatten(0, 1)
    return [flat[a:b] for a, b in pairwise(launch.inputs.query_start.tolist())]


def check(create: Create, launch: Launch, *, packed: bool, tolerance: float = 1e-5) -> None:
    for row, out in enumerate(run(create, launch, packed=packed)):
        assert_dense(out, launch.query[row], launch.kv[row], launch.spec, tolerance)


@CASES
def test_decode_and_packed_prefill_equal_dense_float64(create: Create, case: Case, packed: bool) -> None:
    check(create, Launch(case), packed=packed)


@CASES
def test_the_cache_is_what_the_reference_leaves(create: Create, case: Case, packed: bool) -> None:
    ours, theirs = Launch(case), Launch(case)
    run(create, ours, packed=packed)
    theirs.run(packed=packed)
    assert torch.equal(ours.cache.nan_to_num(nan=7.0), theirs.cache.nan_to_num(nan=7.0))


@BOTH_LAYOUTS
def test_random_cases_on_random_pages_equal_dense_float64(
    create: Create, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention.cpu.schedule, "CHUNK_TOKENS", 64)  # many chunks, several groups
    monkeypatch.setattr(attention.cpu.schedule, "GROUP_BYTES", 1 << 18)
    rng = random.Random(5)
    for seed in range(40):
        check(create, Launch(random_case(rng, rng.randint(1, 5), packed=packed), seed), packed=packed)


@pytest.mark.parametrize("junk", [math.nan, math.inf])
@CASES
def test_what_no_sequence_owns_changes_nothing(create: Create, case: Case, packed: bool, junk: float) -> None:
    """Garbage in unused pages, in unused places of used pages and in the scratch page: bit-equal results."""
    clean, poisoned = Launch(case, junk=0.0), Launch(case, junk=junk)
    assert torch.equal(torch.cat(run(create, clean, packed=packed)), torch.cat(run(create, poisoned, packed=packed)))


@BOTH_LAYOUTS
def test_table_entries_past_the_longest_sequence_are_never_read(create: Create, packed: bool) -> None:
    launch = Launch(Case((3, 3), (15, 16)))  # two pages each
    launch.tables[:, 2:] = 10**6
    check(create, launch, packed=packed)


def test_a_row_attends_to_pages_that_another_row_of_the_launch_stores(create: Create) -> None:
    launch = Launch(Case((1, 20), (18, 20)))
    launch.tables[0, :2] = launch.tables[1, :2]
    shared = torch.cat((launch.kv[1][:, :16], launch.kv[0][:, 16:]), dim=1)
    assert_dense(run(create, launch, packed=True)[0], launch.query[0], shared, launch.spec)


@DTYPES
@BOTH_LAYOUTS
def test_half_precision_is_close_to_float64_on_the_same_values(
    create: Create, packed: bool, dtype: torch.dtype
) -> None:
    cases = (
        Case((3, 3), (60, 600), page=16, window=300, softcap=8.0),
        Case((9, 9), (9, 1100), page=16),
        Case((2, 2), (30, 5), dim=36),
    )
    for case in cases:
        check(create, Launch(case, dtype=dtype), packed=packed, tolerance=1e-5 if dtype == torch.float32 else 1e-2)


@BOTH_LAYOUTS
def test_the_ops_pass_opcheck(packed: bool) -> None:
    launch = Launch(Case((3, 3), (3, 17), window=9), junk=0.0)
    backend, inputs = backend_for(CpuBackend, launch, packed=packed), inputs_of(launch, packed=packed)
    assert isinstance(backend, CpuBackend)
    places = backend.buffers()["places"]
    args = (*launch.tensors(packed=packed), launch.cache, places, *inputs, *launch.spec)
    torch.library.opcheck(backend.op, args)
    if not packed:
        prepared = (inputs.block_tables, inputs.seq_lens, inputs.slot_mapping, places, inputs.query_len)
        torch.library.opcheck(backend.prepare_op, prepared)


@BOTH_LAYOUTS
def test_the_native_op_passes_opcheck(packed: bool) -> None:
    launch = Launch(Case((3, 3), (3, 17), window=9), junk=0.0)
    args = (*launch.tensors(packed=packed), launch.cache, *inputs_of(launch, packed=packed), *launch.spec)
    torch.library.opcheck(or_skip(NativeBackend).op, args)


def test_compiled_calls_mutate_the_cache_in_place_and_equal_eager(create: Create) -> None:
    eager, compiled = Launch(DECODES[1]), Launch(DECODES[1])
    backend, inputs = backend_for(create, eager, packed=False), inputs_of(eager, packed=False)

    def twice(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        backend.prepare(inputs)
        first = backend.attend(query, key, value, cache, inputs, eager.spec)
        return first + backend.attend(query, key + 1, value * 2, cache, inputs, eager.spec)

    expected = twice(*eager.tensors(packed=False), eager.cache)
    compiled_twice = torch.compile(twice, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled_twice(*compiled.tensors(packed=False), compiled.cache), expected)
    assert torch.equal(compiled.cache.nan_to_num(), eager.cache.nan_to_num())


class Step:
    """One captured decode step of two layers, on static inputs whose contents change between replays."""

    def __init__(self, create: Create, rows: int, query_len: int, specs: tuple[AttentionSpec, ...]) -> None:
        cpu, width, self.page, self.specs, self.query_len = torch.device("cpu"), 100, 16, specs, query_len
        self.shape = AttentionShape(6, 2, 64, self.page, width, torch.float32, cpu, specs)
        self.pages = torch.randperm(rows * width).view(rows, width).to(torch.int32)
        self.caches = [torch.randn(rows * width + 1, 2, 2, self.page, 64) for _ in specs]
        self.backend, self.buffers = create(self.shape), PersistentBuffers()
        sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "tables": ((rows, width), torch.int32),
            "lens": ((rows,), torch.int32),
            "slots": ((rows * query_len,), torch.int64),
            "query": ((rows, 6, query_len, 64), torch.float32),
            "key": ((rows, 2, query_len, 64), torch.float32),
            "value": ((rows, 2, query_len, 64), torch.float32),
        }
        self.static = {
            name: self.buffers.allocate(name, *size, cpu, writer="test", every_step=True)
            for name, size in sizes.items()
        }
        self.backend.plan([Bucket(rows, query_len)], self.static["tables"])
        for name, tensor in (*self.backend.buffers().items(), *((f"kv.{i}", c) for i, c in enumerate(self.caches))):
            self.buffers.add(name, tensor, writer="step")

    def stage(self, lens: list[int]) -> AttnInputs:
        static, rows = self.static, len(lens)
        static["lens"].copy_(torch.tensor(lens))
        static["tables"].fill_(rows * self.pages.shape[1])
        for row, n in enumerate(lens):
            own = -(-n // self.page)
            static["tables"][row, :own] = self.pages[row, :own]
        places = static["lens"].unsqueeze(1) - self.query_len + torch.arange(self.query_len)
        slots = static["tables"].gather(1, places // self.page).long() * self.page + places % self.page
        static["slots"].copy_(slots.flatten())
        for name in ("query", "key", "value"):
            static[name].normal_()
        return self.inputs()

    def inputs(self) -> AttnInputs:
        starts = torch.arange(0, len(self.static["lens"]) * self.query_len + 1, self.query_len, dtype=torch.int32)
        static = self.static
        return AttnInputs(static["tables"], static["lens"], starts, static["slots"], self.query_len)

    def run(self) -> tuple[torch.Tensor, ...]:
        inputs = self.inputs()
        self.backend.prepare(inputs)
        layers = zip(self.caches, self.specs, strict=True)
        return tuple(self.backend.attend(*self.new(), cache, inputs, spec) for cache, spec in layers)

    def new(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.static["query"], self.static["key"], self.static["value"]


def test_one_record_serves_every_length(create: Create) -> None:
    """Planned once, recorded once; the replays equal the reference, under two windows, and eager bit for bit."""
    torch.manual_seed(0)
    specs = (AttentionSpec(0.125), AttentionSpec(0.125, window=40, softcap=5.0))
    step, rng, reference = Step(create, 3, 4, specs), random.Random(1), ReferenceBackend()
    step.stage([4, 4, 4])
    graph = capture(step.run, step.buffers, key="step", backend=create_graphs(torch.device("cpu")))
    for _ in range(12):
        lens = [rng.choice((4, 16, 17, CHUNK_TOKENS, CHUNK_TOKENS + 1, 1600, rng.randint(4, 1600))) for _ in range(3)]
        inputs = step.stage(lens)
        caches = [cache.clone() for cache in step.caches]
        expected = [reference.attend(*step.new(), c, inputs, spec) for c, spec in zip(caches, specs, strict=True)]
        out = graph.replay()
        assert isinstance(out, tuple)
        for ours, theirs, cache, kept in zip(out, expected, step.caches, caches, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
            assert torch.equal(cache, kept)
        assert compare_replay(graph) is None


def test_a_bucket_uses_the_leading_places_of_a_larger_one() -> None:
    launch = Launch(DECODES[0])
    backend, inputs = CpuBackend(shape_for(launch)), inputs_of(launch, packed=False)
    backend.plan([Bucket(9, 1), Bucket(3, 6), Bucket(3, 1)], launch.tables)
    assert backend.buffers()["places"].shape == (2, 3 * 6 * launch.case.kv_heads)
    backend.prepare(inputs)
    out = backend.attend(*launch.tensors(packed=False), launch.cache, inputs, launch.spec)
    for row, result in enumerate(out):
        assert_dense(result, launch.query[row], launch.kv[row], launch.spec)


def test_results_outlive_the_next_layer(create: Create) -> None:
    """Scratch memory is shared by layers; what a layer returned is not in it."""
    launch = Launch(DECODES[3])
    backend, inputs = backend_for(create, launch, packed=False), inputs_of(launch, packed=False)
    query, key, value = launch.tensors(packed=False)
    first = backend.attend(query, key, value, launch.cache, inputs, launch.spec)
    kept = first.clone()
    backend.attend(query + 1, key + 1, value + 1, launch.cache, inputs, launch.spec)
    assert torch.equal(first, kept)


def test_padding_rows_change_no_other_row(create: Create) -> None:
    """A padding row lies on the scratch page alone and is as long as its queries; what it brings may be garbage."""
    clean, poisoned = Launch(Case((4, 4), (600, 4), page=16)), Launch(Case((4, 4), (600, 4), page=16))
    for launch in (clean, poisoned):
        launch.tables[1] = launch.scratch
        launch.inputs.slot_mapping[4:] = launch.scratch * 16 + torch.arange(4)
    poisoned.query[1].fill_(math.nan)
    poisoned.kv[1].fill_(math.inf)
    assert torch.equal(run(create, clean, packed=False)[0], run(create, poisoned, packed=False)[0])


def test_the_ops_do_not_keep_the_backend_alive() -> None:
    launch = Launch(DECODES[0])
    backend = backend_for(CpuBackend, launch, packed=False)
    assert isinstance(backend, CpuBackend)
    op, alive = backend.op, weakref.ref(backend)
    del backend
    gc.collect()
    assert alive() is None
    del op
