"""The FlashInfer backends on the CPU: real wrappers, real planner, emulated kernels."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from conftest import tiny_model
from emulated_fa2 import HostPlanner
from emulated_flashinfer import FakeGpu
from same_text import NearTies, Scorer, assert_same_text

import graphspec.models.paging
from attention import AttentionShape, AttentionSpec, AttnInputs, Bucket, KVLayout, Machine, allocate_kv_cache
from attention.create import decode_backend
from attention.flashinfer.choice import Choice
from attention.flashinfer.guards import FA2, FA2_SPLIT, NAMES, XQA
from attention.flashinfer.per_bucket import PerBucket
from attention.flashinfer.prefill import Fa2Prefill
from graphspec import Engine, EngineConfig, SamplingParams
from graphspec.models.paged_model import PagedModel

pytestmark = pytest.mark.flashinfer

H200 = Machine((9, 0), 132)
PAGE, WIDTH = 16, 40
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, key, value
SPECS = (AttentionSpec(0.25), AttentionSpec(0.25, window=50))


@pytest.fixture
def gpu(host_planner: HostPlanner, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu(host_planner)
    fake.install(monkeypatch)
    return fake


def shape_of(**changes: Any) -> AttentionShape:
    settings = {
        "num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": PAGE, "table_width": WIDTH,
        "dtype": torch.float32, "device": torch.device("cpu"), "specs": SPECS, **changes,
    }  # fmt: skip
    return AttentionShape(**settings)


def backend_of(name: str, shape: AttentionShape) -> PerBucket:
    """`name` for decode steps and FA2 for prefill, in float32 too, which only the emulated kernels compute."""
    return PerBucket(
        lambda _: Choice(name, "test"), lambda n: decode_backend(n, shape, H200), Fa2Prefill(shape, H200, 3)
    )


class Step:
    """A decode step on random pages: static block tables for the most rows, one layer's cache, new K/V."""

    def __init__(self, shape: AttentionShape, rows: int) -> None:
        self.shape = shape
        self.tables = torch.randperm(rows * WIDTH).view(rows, WIDTH).to(torch.int32)
        self.cache = torch.randn(rows * WIDTH, 2, shape.num_kv_heads, PAGE, shape.head_dim, dtype=shape.dtype)

    def inputs(self, lens: list[int], query_len: int) -> tuple[Triple, AttnInputs]:
        rows, shape = len(lens), self.shape
        lengths = torch.tensor(lens, dtype=torch.int32)
        places = lengths.unsqueeze(1) - query_len + torch.arange(query_len)
        slots = self.tables[:rows].gather(1, places // PAGE).long() * PAGE + places % PAGE
        starts = torch.arange(rows + 1, dtype=torch.int32) * query_len
        query = torch.randn(rows, shape.num_heads, query_len, shape.head_dim, dtype=shape.dtype)
        key, value = torch.randn(2, rows, shape.num_kv_heads, query_len, shape.head_dim, dtype=shape.dtype)
        return (query, key, value), AttnInputs(self.tables[:rows], lengths, starts, slots.flatten(), query_len)


@pytest.mark.parametrize("name", NAMES)
def test_decode_steps_equal_the_reference_for_every_length(gpu: FakeGpu, name: str) -> None:
    """Planned once; then lengths change, buckets take turns, and every spec of the model is served."""
    torch.manual_seed(0)
    rng, shape = random.Random(0), shape_of()
    step, backend = Step(shape, 6), backend_of(name, shape)
    backend.plan([Bucket(rows, q) for rows in (1, 3, 6) for q in (1, 4)], step.tables)
    planned = len(gpu.planned)
    for _ in range(12):
        rows, query_len = rng.choice((1, 3, 6)), rng.choice((1, 4))
        lens = [rng.choice((query_len, PAGE, PAGE + 1, WIDTH * PAGE, rng.randint(query_len, 600))) for _ in range(rows)]
        lens = [max(n, query_len) for n in lens]
        tensors, inputs = step.inputs(lens, query_len)
        backend.prepare(inputs)
        for spec in SPECS:
            expected_cache = step.cache.clone()
            expected = torch.ops.paged_attention.reference(*tensors, expected_cache, *inputs, *spec)
            out = backend.attend(*tensors, step.cache, inputs, spec)
            assert torch.equal(step.cache, expected_cache)
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert len(gpu.planned) == planned  # nothing was planned after the start


def test_a_stale_schedule_is_wrong_and_prepare_is_what_repairs_it(gpu: FakeGpu) -> None:
    shape = shape_of(specs=SPECS[:1])
    step, backend = Step(shape, 3), backend_of(FA2_SPLIT, shape)
    backend.plan([Bucket(3, 4)], step.tables)
    tensors, inputs = step.inputs([WIDTH * PAGE, 300, 20], 4)
    backend.prepare(inputs)
    _, shorter = step.inputs([40, 150, 4], 4)
    shorter = shorter._replace(slot_mapping=inputs.slot_mapping)
    expected = torch.ops.paged_attention.reference(*tensors, step.cache, *shorter, *SPECS[0])
    next(iter(backend.buffers().values())).copy_(shorter.seq_lens - (WIDTH - 1) * PAGE)
    with pytest.raises(AssertionError, match="written twice"):  # the kernel sees new lengths, its schedule is old
        torch.testing.assert_close(backend.attend(*tensors, step.cache, shorter, SPECS[0]), expected)
    backend.prepare(shorter)
    out = backend.attend(*tensors, step.cache, shorter, SPECS[0])
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [FA2, FA2_SPLIT])
def test_what_fa2_gets_is_static_and_by_address(gpu: FakeGpu, name: str) -> None:
    shape = shape_of(dtype=torch.bfloat16)
    step, backend = Step(shape, 5), backend_of(name, shape)
    backend.plan([Bucket(5, 4)], step.tables)
    for args, spec in zip(gpu.planned, SPECS, strict=True):  # the planner's flags
        _, _, _, qo_indptr, _, kv_lens, rows, batch, heads, kv_heads, page, graph, *_, causal, window, fixed = args[:17]
        assert qo_indptr.tolist() == [0, 4, 8, 12, 16, 20]
        assert set(kv_lens.tolist()) == {WIDTH * PAGE}
        assert (rows, batch, heads, kv_heads, page, graph, causal, fixed) == (20, 5, 8, 2, PAGE, True, True, -1)
        assert window == (-1 if spec.window is None else spec.window - 1)
        assert args[17:20] == (name == FA2, 0, 4)  # disable_split_kv, colocated blocks, uniform_q_len
    for lens in ([4, 100, 640, 17, 16], [5, 4, 4, 4, 4]):
        tensors, inputs = step.inputs(lens, 4)
        backend.prepare(inputs)
        for spec in SPECS:
            backend.attend(*tensors, step.cache, inputs, spec)
    static = ("float_workspace", "int_workspace", "qo_indptr", "kv_indptr", "kv_indices", "last_page_len")
    for first, later in zip(gpu.ran[:2], gpu.ran[2:], strict=True):
        assert [first[n].data_ptr() for n in static] == [later[n].data_ptr() for n in static]
        assert list(first["plan_info"]) == list(later["plan_info"])
        assert first["kv_indices"].data_ptr() == step.tables.data_ptr()
        assert first["k_cache"].data_ptr() == step.cache.data_ptr()
        assert (first["layout"], first["enable_pdl"], first["lse"], first["sm_scale"]) == (1, False, None, 0.25)
    written = {tensor.data_ptr() for tensor in backend.buffers().values()}
    assert {first["last_page_len"].data_ptr() for first in gpu.ran} <= written
    assert ({first["int_workspace"].data_ptr() for first in gpu.ran} <= written) == (name == FA2_SPLIT)
    with pytest.raises(AssertionError, match="static block tables"):
        backend.prepare(inputs._replace(block_tables=step.tables.clone()))


def test_what_xqa_gets(gpu: FakeGpu) -> None:
    shape = shape_of(dtype=torch.bfloat16)
    step, backend = Step(shape, 5), backend_of(XQA, shape)
    backend.plan([Bucket(5, 40), Bucket(5, 1)], step.tables)
    for query_len in (40, 1):
        tensors, inputs = step.inputs([40, 41, 640, 100, 64], query_len)
        for spec in SPECS:
            backend.attend(*tensors, step.cache, inputs, spec)
            run = gpu.xqa_ran[-1]
            assert run["page_table"].data_ptr() == step.tables.data_ptr()
            assert run["seq_lens"].data_ptr() == inputs.seq_lens.data_ptr()
            assert run["k_cache"].data_ptr() == step.cache.data_ptr()
            assert run["k_cache"].stride() == run["v_cache"].stride()
            assert (run["sliding_win_size"], run["enable_pdl"]) == (spec.window or 0, False)
            assert (run["max_seq_len"], run["sm_count"]) == (WIDTH * PAGE, 132)
    assert len({run["semaphores"].data_ptr() for run in gpu.xqa_ran}) == 1
    assert not gpu.planned


def test_prefill_is_planned_from_exact_lengths_in_turns(gpu: FakeGpu) -> None:
    torch.manual_seed(0)
    shape = shape_of()
    step, backend = Step(shape, 4), backend_of(FA2, shape)
    for queries, lens in (((7, 1, 20), (7, 130, 21)), ((33,), (64,)), ((1, 2), (1, 640)), ((5, 5), (5, 16))):
        rows, total = len(lens), sum(queries)
        starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0).to(torch.int32)
        lengths = torch.tensor(lens, dtype=torch.int32)
        places = [torch.arange(n - q, n) for q, n in zip(queries, lens, strict=True)]
        slots = torch.cat([step.tables[r, p // PAGE].long() * PAGE + p % PAGE for r, p in enumerate(places)])
        inputs = AttnInputs(step.tables[:rows], lengths, starts, slots)
        query, key, value = torch.randn(3, 1, shape.num_heads, total, shape.head_dim)
        tensors = (query, key[:, :2], value[:, :2])
        backend.plan_prefill(inputs.block_tables, lengths, starts)
        for spec in SPECS:
            expected = torch.ops.paged_attention.reference(*tensors, step.cache, *inputs, *spec)
            out = backend.attend(*tensors, step.cache, inputs, spec)
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    pinned = [args[2].data_ptr() for args in gpu.planned]
    assert len(set(pinned)) == 3 * len(SPECS)  # in_flight turns
    assert pinned[: len(SPECS)] == pinned[3 * len(SPECS) :]


@pytest.mark.parametrize("name", NAMES)
def test_the_ops_pass_opcheck_and_compile(gpu: FakeGpu, name: str) -> None:
    shape = shape_of(specs=SPECS[:1])
    step, backend = Step(shape, 3), backend_of(name, shape)
    backend.plan([Bucket(3, 4)], step.tables)
    tensors, inputs = step.inputs([40, 300, 4], 4)
    backend.prepare(inputs)
    inner: Any = backend._backends[name]
    torch.library.opcheck(inner.op, (*tensors, step.cache, *inputs, *SPECS[0]))

    def twice(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        first = backend.attend(query, key, value, cache, inputs, SPECS[0])
        return first + backend.attend(query, key + 1, value * 2, cache, inputs, SPECS[0])

    eager, compiled = step.cache.clone(), step.cache.clone()
    expected = twice(*tensors, eager)
    out = torch.compile(twice, fullgraph=True, backend="aot_eager", dynamic=False)(*tensors, compiled)
    assert torch.equal(out, expected)
    assert torch.equal(eager, compiled)


def test_an_op_goes_with_its_backend(gpu: FakeGpu) -> None:
    import gc
    import weakref

    shape = shape_of()
    backend = backend_of(XQA, shape)
    backend.plan([Bucket(1, 1)], Step(shape, 1).tables)
    inner: Any = backend._backends[XQA]
    name, alive = inner.op._schema.name.removeprefix("paged_attention::"), weakref.ref(inner)
    assert hasattr(torch.ops.paged_attention, name)
    del backend, inner
    gc.collect()
    assert alive() is None
    assert not hasattr(torch.ops.paged_attention, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_compiles_as_one_region_with_the_ops_in_it(gpu: FakeGpu, name: str) -> None:
    torch.manual_seed(0)
    layout = KVLayout(3, 2 * WIDTH, PAGE, 2, 12, torch.float32)
    model = PagedModel(tiny_model())
    specs = model.bind(allocate_kv_cache(layout, torch.device("cpu")))
    shape = shape_of(num_heads=4, head_dim=12, specs=specs)
    step, backend = Step(shape, 2), backend_of(name, shape)
    backend.plan([Bucket(2, 4)], step.tables)
    model.attend_with(backend)
    _, inputs = step.inputs([40, 4], 4)
    backend.prepare(inputs)
    tokens, positions = torch.randint(3, 200, (2, 4)), torch.tensor([[36, 37, 38, 39], [0, 1, 2, 3]])
    with torch.no_grad():
        expected, _ = model.forward(tokens, positions, inputs)
        compiled = torch.compile(model.forward, fullgraph=True, dynamic=False, backend="aot_eager")
        assert torch.equal(compiled(tokens, positions, inputs)[0], expected)
    model.close()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("architecture", "k"), [("llama", 3), ("mistral", 0)])
def test_an_engine_gives_the_text_of_the_reference(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, name: str, architecture: str, k: int
) -> None:
    """Recorded graphs, run-ahead, chunked prefill, padding rows, sliding windows: lengths known to the device only."""
    prompts = [[5, 6, 7, 8, 5, 6, 7], [9, 10, 11], list(range(20, 70)), [4], [8, 8]]  # 5 rows in the graph of 6
    params = SamplingParams(max_tokens=10, ignore_eos=True)

    def run(**config: Any) -> list[list[int]]:
        settings: Any = {"max_num_seqs": 6, "max_model_len": 96, "max_prefill_tokens": 24, "num_speculative_tokens": k}
        with Engine(tiny_model(architecture), config=EngineConfig(**settings, debug=True, **config)) as engine:
            texts = [c.token_ids for c in engine.generate(prompts, params, progress=False)]
            assert engine.stats().off_graph_decode_steps == 0
            return texts

    reference = run()

    def create(_: str, shape: AttentionShape, **__: Any) -> PerBucket:
        return backend_of(name, shape)

    monkeypatch.setattr(graphspec.models.paging, "create_attention", create)
    emulated = run()
    assert gpu.xqa_ran if name == XQA else any(args[11] for args in gpu.planned)
    ties, scorer = NearTies(), Scorer(tiny_model(architecture))
    for prompt, a, b in zip(prompts, reference, emulated, strict=True):
        assert_same_text(scorer, prompt, a, b, ties)
    ties.check()


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_model_drafts_what_it_drafts_on_the_reference(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It has a backend of its own, for other heads and with tables of its own: a step plans nothing, and runs it with
    1 + k tokens per row and then k - 1 times with one. After every step all drafts of all slots are compared."""
    prompts = [[5, 6, 7, 8, 5, 6, 7], list(range(20, 70)), [4]]
    settings: Any = {"max_num_seqs": 4, "graph_rows": (2, 4), "max_model_len": 96, "max_prefill_tokens": 24}
    config = EngineConfig(**settings, num_speculative_tokens=3, depth=0, debug=True, draft_shares_noise=False)
    backends: list[PerBucket] = []

    def create(_: str, shape: AttentionShape, **__: Any) -> PerBucket:
        assert shape.head_dim == (16 if backends else 12)
        backends.append(backend_of(name, shape))
        return backends[-1]

    def decode_plans() -> int:
        return sum(bool(args[11]) for args in gpu.planned)  # those made for graphs

    def run() -> list[torch.Tensor]:
        seen = []
        with Engine(tiny_model(), config=config, draft_model=tiny_model("qwen3")) as engine:
            planned = decode_plans()
            for prompt in prompts:
                engine.add_request(prompt, SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True))
            while engine.has_unfinished_requests():
                engine.step()
                seen.append(engine._runner._state.drafts.clone())
            assert engine.stats().off_graph_decode_steps == 0
            assert decode_plans() == planned
        return seen

    reference = run()
    monkeypatch.setattr(graphspec.models.paging, "create_attention", create)
    emulated = run()
    assert len(backends) == 2
    assert gpu.xqa_ran if name == XQA else decode_plans() > 4
    assert len(reference) == len(emulated) > 10
    assert all(torch.equal(a, b) for a, b in zip(reference, emulated, strict=True))
    assert len(torch.unique(torch.stack(emulated))) > 30
