"""Every decode step of the engine replays a captured graph, and the graph does what the eager step does."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from conftest import VOCAB, tiny_model

from graphs import BucketLadder, CapturedGraph, compare_replay, poison
from graphspec import Completion, Engine, EngineConfig, EngineStats, SamplingParams
from graphspec.execution.iteration import DecodeInputs
from graphspec.models.paging import Paging
from graphspec.sampling.keyed_sampling import SAMPLERS

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
PARAMS = [
    GREEDY,
    SamplingParams(max_tokens=30, temperature=0.8, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=17, temperature=1.1, top_k=12, seed=2),
    SamplingParams(max_tokens=24, temperature=0.9, top_p=0.8, seed=3, ignore_eos=True),
    SamplingParams(
        max_tokens=12, repetition_penalty=1.3, presence_penalty=0.5, min_tokens=6, bad_words_ids=[[7], [8, 9]]
    ),
    SamplingParams(max_tokens=9, temperature=0.8, seed=5, logprobs=4, prompt_logprobs=2),
]


def prompts(count: int, longest: int = 20) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def run(count: int, params: list[SamplingParams], **config: Any) -> tuple[list[Completion], EngineStats]:
    config = {"max_num_seqs": 8, "page_size": 8, "max_model_len": 96, "max_prefill_tokens": 24, **config}
    with Engine(tiny_model(), config=EngineConfig(**config)) as engine:
        done = engine.generate(prompts(count), [params[i % len(params)] for i in range(count)], progress=False)
        return done, engine.stats()


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("depth", [0, 2])
def test_tokens_are_bit_equal_to_eager_and_no_step_is_off_graph(k: int, depth: int) -> None:
    """A mixed load: prefill chunks beside decodes, arrivals and ends, every sampler kind."""
    graphs, stats = run(20, PARAMS, num_speculative_tokens=k, depth=depth)
    eager, off = run(20, PARAMS, num_speculative_tokens=k, depth=depth, enforce_eager=True)
    assert [(c.token_ids, c.logprobs) for c in graphs] == [(c.token_ids, c.logprobs) for c in eager]
    assert (stats.off_graph_decode_steps, stats.off_graph_reasons) == (0, {})
    assert off.off_graph_reasons == {"eager_mode": off.off_graph_decode_steps}
    assert off.off_graph_decode_steps > 20
    assert off.num_graphs == 0


def test_every_batch_size_replays_a_graph_that_holds_it() -> None:
    """Scenario 32: sizes in the gaps of the ladder pad up; the largest batch is the last rung."""
    for rows in range(1, 12):
        with Engine(tiny_model(), config=EngineConfig(max_num_seqs=11, max_model_len=64)) as engine:
            engine.generate(
                [[5, 6, 7 + i] for i in range(rows)], SamplingParams(max_tokens=4, ignore_eos=True), progress=False
            )
            stats = engine.stats()
            keys: list[Any] = [line.key for line in engine._runner.decode_step.store.ledger()]
        assert stats.off_graph_decode_steps == 0
        assert {key.rows for key in keys} >= {BucketLadder.up_to(11).pad(rows)}


def test_a_prefill_chunk_of_1_plus_k_tokens_is_no_decode() -> None:
    """Scenario 31: the kind of a graph comes from the state of a request, never from a shape."""
    with Engine(tiny_model(), config=EngineConfig(num_speculative_tokens=3, max_prefill_tokens=4)) as engine:
        engine.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=1), progress=False)
        assert engine._runner.decode_step.store.num_replays == 0
        assert engine.stats().off_graph_decode_steps == 0


def test_running_past_the_longest_length_stays_on_graph() -> None:
    done, stats = run(3, [SamplingParams(max_tokens=200, ignore_eos=True)], num_speculative_tokens=5, max_model_len=40)
    assert {c.finish_reason for c in done} == {"length"}
    assert stats.off_graph_decode_steps == 0


def test_idle_graphs_are_reused_and_none_is_left_without_a_replay() -> None:
    """Scenario 57 for graphs: a second load captures nothing new."""
    with Engine(tiny_model(), config=EngineConfig(max_num_seqs=4, max_model_len=64)) as engine:
        engine.generate(prompts(6), GREEDY, progress=False)
        first = engine.stats().num_graphs
        engine.generate(prompts(6), GREEDY, progress=False)
        assert engine.stats().num_graphs == first
        assert engine._runner.decode_step.store.never_replayed() == []


def test_eager_capture_knows_every_key_before_serving() -> None:
    """Bug classes A 3 and 13: every key that a lookup can make was captured, by the same function."""
    config = EngineConfig(max_num_seqs=3, max_model_len=64, num_speculative_tokens=2, capture="eager")
    with Engine(tiny_model(), config=config) as engine:
        before = engine.stats().num_graphs
        assert before == len(SAMPLERS) * len(BucketLadder.up_to(3).rungs)
        eager = engine.generate(prompts(9), [PARAMS[i % len(PARAMS)] for i in range(9)], progress=False)
        assert engine.stats().num_graphs == before
        assert len(engine._runner.decode_step.store.never_replayed()) < before
    lazy, _ = run(9, PARAMS, max_num_seqs=3, max_model_len=64, num_speculative_tokens=2)
    assert [c.token_ids for c in eager] == [c.token_ids for c in lazy]


EVERYTHING = SamplingParams(
    max_tokens=24, temperature=0.9, top_p=0.9, seed=6, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.4,
    bad_words_ids=[[7], [8, 9]], logit_bias={11: 2.0}, stop_token_ids=[12], min_tokens=20, logprobs=4,
)  # fmt: skip


def mid_flight(sampler: str, k: int = 3) -> tuple[Engine, CapturedGraph]:
    """An engine stopped in the middle of a load with 3 rows in the 4-row graph, and that graph."""
    config = EngineConfig(num_speculative_tokens=k, depth=0, max_num_seqs=4, max_model_len=64, page_size=4, debug=True)
    engine = Engine(tiny_model(), config=config)
    for prompt in prompts(3):
        engine.add_request(prompt, GREEDY if sampler == "greedy" else EVERYTHING)
    for _ in range(6):
        engine.step()
    assert engine._runner.last_key is not None
    assert engine._runner.graph_plan.ladder.pad(3) == 3  # so use the padded 4-row graph by hand
    assert engine._runner.last_key.sampler == sampler
    key = engine._runner.last_key._replace(rows=4)
    step, scratch_slot = engine._runner.decode_step, engine._runner._state.scratch_slot

    def stage() -> None:
        slots, tables = (t.clone() for t in step.inputs)
        step.capture(key)
        slots[3] = scratch_slot
        tables[3] = engine.config.num_pages
        step.stage(DecodeInputs(slots, tables))

    engine._runner.on_stream(stage)
    return engine, step.store[key]


KINDS = ["greedy", "sorted+processors+logprobs"]


@pytest.mark.parametrize("sampler", KINDS)
def test_a_replay_in_the_middle_of_a_load_equals_eager_op_by_op(sampler: str) -> None:
    engine, graph = mid_flight(sampler)
    assert engine._runner.on_stream(lambda: compare_replay(graph)) is None
    engine.close()


@pytest.mark.parametrize("sampler", KINDS)
def test_poisoned_padding_changes_no_real_row(sampler: str) -> None:
    """Scenario 58: NaN, -1 and 0x7f in the scratch page and in all that the scratch slot owns."""
    engine, graph = mid_flight(sampler)
    padding = engine._runner.decode_step.padding()
    assert {"kv.0", "state.history", "state.drafts", "state.sampling.seed", "state.processors.phrases"} <= set(padding)
    assert engine._runner.on_stream(lambda: poison(graph, padding, lambda outputs: [out[:3] for out in outputs])) == []
    engine._runner.decode_step.buffers.check_canaries()
    engine.close()


def test_graphs_write_nothing_but_their_buffers() -> None:
    """In debug mode every launch is audited: one writer per buffer, inputs written before they are read."""
    done, _ = run(len(PARAMS), PARAMS, num_speculative_tokens=2, debug=True)
    plain, _ = run(len(PARAMS), PARAMS, num_speculative_tokens=2)
    assert [c.token_ids for c in done] == [c.token_ids for c in plain]


def test_a_write_by_a_stranger_fails_the_launch_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(tiny_model(), config=EngineConfig(debug=True)) as engine:
        runner = engine._runner
        finish = runner._run

        def meddle(*args: Any) -> None:
            with runner.decode_step.buffers.writing("stranger"):
                runner._state.computed.add_(0)
            finish(*args)

        monkeypatch.setattr(runner, "_run", meddle)
        with pytest.raises(RuntimeError, match=r"state.computed.*is written by stranger, its writer is step"):
            engine.generate([[5, 6, 7]], GREEDY, progress=False)


def test_the_address_of_a_buffer_that_moved_stops_the_engine() -> None:
    with Engine(tiny_model(), config=EngineConfig()) as engine:
        engine.add_request([5, 6, 7], GREEDY)
        for _ in range(4):
            engine.step()
        computed = engine._runner._state.computed

        def move() -> None:
            computed.set_(computed.clone())  # type: ignore[call-overload]

        engine._runner.on_stream(move)
        with pytest.raises(RuntimeError, match=r"state.computed. moved from 0x"):
            engine.generate([[5, 6, 7]], GREEDY, progress=False)


def test_the_self_test_passes_and_leaves_no_trace() -> None:
    config = EngineConfig(max_num_seqs=3, max_model_len=64, num_speculative_tokens=2, page_size=2, self_test=True)
    with Engine(tiny_model(), config=config) as engine:
        assert engine.stats().num_graphs == 3 * len(SAMPLERS)
        tested = engine.generate(prompts(5), [PARAMS[i % len(PARAMS)] for i in range(5)], progress=False)
    plain, _ = run(5, PARAMS, max_num_seqs=3, max_model_len=64, num_speculative_tokens=2, page_size=2)
    assert [c.token_ids for c in tested] == [c.token_ids for c in plain]


def test_the_self_test_finds_a_padding_row_that_writes_page_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """And names the op that wrote it."""
    mapping = Paging.slot_mapping

    def leaky(self: Paging, block_tables: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        places = mapping(self, block_tables, positions)
        scratch = self.scratch_page * self.page_size
        return torch.where(places >= scratch, places - scratch, places)

    monkeypatch.setattr(Paging, "slot_mapping", leaky)
    wrote = r'found \d+ faults: .*rows=2.* changes buffer "kv\.1", written by paged_attention\..* at .*\.py:\d+'
    with pytest.raises(RuntimeError, match=wrote):
        Engine(tiny_model(), config=EngineConfig(max_num_seqs=2, max_model_len=64, self_test=True))


def test_requests_say_how_many_steps_they_took_and_how_many_were_off_graph() -> None:
    """Per request too; preemption loses nothing of it."""
    params = [SamplingParams(max_tokens=9, ignore_eos=True)]
    graphs, stats = run(6, params, num_speculative_tokens=0, num_pages=4, max_model_len=32)
    assert stats.num_preemptions > 0
    assert {c.num_decode_steps for c in graphs} >= {8}  # the first token comes from the prefill
    assert {c.num_off_graph_steps for c in graphs} == {0}
    eager, _ = run(6, params, num_speculative_tokens=0, enforce_eager=True)
    assert {(c.num_decode_steps, c.num_off_graph_steps) for c in eager} == {(8, 8)}


@pytest.mark.parametrize("rows", [(1, 3), (4, 8, 9)])
def test_a_ladder_of_the_user_with_holes_is_refused(rows: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"no graph holds 4 rows|no batch reaches the rungs 8, 9"):
        Engine(tiny_model(), config=EngineConfig(max_num_seqs=4, graph_rows=rows))
