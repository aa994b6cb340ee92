"""The engine's interface: bad input, streaming, abort, faults, and launches of exactly 1 + k positions."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VOCAB, tiny_model
from same_text import NearTies, Scorer, assert_same_text

from graphs import StreamError
from graphs.stream import CpuEvent
from graphspec import Completion, Engine, EngineConfig, SamplingParams, StepOutput
from graphspec.engine.resolve import resolve
from graphspec.records.launch import StepPlan

PROMPT = [5, 6, 7, 8, 9, 5, 6, 7]


@pytest.fixture
def engine() -> Iterator[Engine]:
    config = EngineConfig(max_model_len=64, num_pages=16, page_size=4, max_num_seqs=4)
    with Engine(tiny_model(), config=config) as built:
        yield built


def drain(engine: Engine) -> list[StepOutput]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


@pytest.mark.parametrize(
    ("prompt", "params", "sentence"),
    [
        ([], {}, "prompt is empty"),
        ([5, VOCAB], {}, rf"token id {VOCAB} in prompt is outside the vocabulary 0 .. {VOCAB - 1}"),
        ([-1], {}, "token id -1 in prompt"),
        ([5], {"stop_token_ids": [VOCAB + 7]}, f"token id {VOCAB + 7} in stop_token_ids"),
        ([5] * 64, {}, "64 tokens and max_model_len is 64"),
        ([5] * 20, {"max_tokens": 60}, r"may need 16 KV pages and the pool has 15"),
        ("text", {}, "no tokenizer: pass token ids"),
    ],
)
def test_a_bad_prompt_is_one_sentence_and_nothing_is_lost(prompt: Any, params: dict[str, Any], sentence: str) -> None:
    config = EngineConfig(max_model_len=64, num_pages=15, page_size=4)
    with Engine(tiny_model(), config=config) as engine:
        engine.add_request(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True))
        engine.step()
        with pytest.raises(ValueError, match=sentence) as caught:
            engine.add_request(prompt, SamplingParams(**params))
        assert "\n" not in str(caught.value)
        assert sum(len(output.new_token_ids) for output in drain(engine)) == 5


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"num_speculative_tokens": -1}, "num_speculative_tokens must be in 0 .. 64, got -1"),
        ({"drafter": "oracle"}, 'unknown drafter "oracle": use one of auto, none, ngram, draft_model, forced'),
        ({"drafter": "none"}, "num_speculative_tokens=0"),
        ({"drafter": "forced", "forced_num_accepted": 4}, "forced_num_accepted must be in 0"),
        ({"depth": -1}, "depth must be in 0 .. 8"),
        ({"max_num_seqs": 0}, "max_num_seqs must be positive"),
        ({"dtype": "int3"}, 'unknown dtype "int3"'),
        ({"kv_memory_fraction": 0.0}, "kv_memory_fraction"),
        ({"attention_backend": "magic"}, 'unknown attention backend "magic"'),
        ({"max_model_len": 4096}, "exceeds the model's limit of 512"),
    ],
)
def test_a_bad_configuration_is_one_sentence(wrong: dict[str, Any], sentence: str) -> None:
    model: Any = tiny_model()
    with pytest.raises(ValueError, match=sentence):
        Engine(model, config=EngineConfig(**wrong))
    assert model.config._attn_implementation == "sdpa"  # the model is as it was
    with Engine(model, config=EngineConfig(num_pages=64)):
        pass
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -2}, {"min_p": 2.0}, {"seed": -1},
        {"repetition_penalty": 0.0}, {"presence_penalty": 2.5}, {"frequency_penalty": -3.0}, {"logit_bias": {1: 101.0}},
        {"allowed_token_ids": []}, {"bad_words": "word"}, {"bad_words": [" "]}, {"bad_words_ids": [[]]},
    ],
)  # fmt: skip
def test_bad_sampling_parameters_name_themselves(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_no_memory_for_a_page_is_one_sentence() -> None:
    with pytest.raises(ValueError, match="leave no room for a single KV page"):
        resolve(EngineConfig(), model_limit=64, page_bytes=1 << 20, free_bytes=1 << 20)


def test_an_interrupted_generate_aborts_its_requests_and_the_engine_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    other = engine.add_request(PROMPT[::-1], params)
    process, interrupts = engine._output_processor.process, [KeyboardInterrupt()]

    def interrupted(emission: Any) -> StepOutput:
        if len(emission.request.output_ids) > 5 and interrupts:
            raise interrupts.pop()
        return process(emission)

    with monkeypatch.context() as patch:
        patch.setattr(engine._output_processor, "process", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([PROMPT, PROMPT], params, progress=False)
    assert list(engine._output_processor.unfinished) == [other]
    assert len(engine.generate([PROMPT], params, progress=False)[0].token_ids) == 30


def test_an_interrupted_wait_loses_no_launch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = engine.generate([PROMPT], params, progress=False)[0].token_ids
    wait, interrupts = CpuEvent.wait, [KeyboardInterrupt()]

    def interrupted(event: CpuEvent) -> None:
        if interrupts:
            raise interrupts.pop()
        wait(event)

    engine.add_request(PROMPT, params)
    outputs = [output for _ in range(2) for output in engine.step()]
    monkeypatch.setattr(CpuEvent, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    outputs += drain(engine)
    assert [token for output in outputs for token in output.new_token_ids] == expected


def test_prompts_may_be_arrays(engine: Engine) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    ways: list[Any] = [PROMPT, tuple(PROMPT), np.array(PROMPT), torch.tensor(PROMPT)]
    assert len({tuple(engine.generate([way], params, progress=False)[0].token_ids) for way in ways}) == 1


def test_generate_refuses_all_prompts_if_one_is_bad(engine: Engine) -> None:
    with pytest.raises(ValueError, match="empty"):
        engine.generate([PROMPT, []], progress=False)
    with pytest.raises(ValueError, match="2 prompts need as many"):
        engine.generate([PROMPT, PROMPT], [SamplingParams()], progress=False)
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("content", "sentence"), [(None, "no config.json"), ("{}", "cannot load"), ("no json", "cannot load")]
)
def test_a_folder_that_is_no_model_is_one_sentence(tmp_path: Path, content: str | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=sentence) as caught:
        Engine.from_pretrained(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_corrupt_or_incomplete_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model: Any = tiny_model()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"incomplete: no usable weights for model.layers.1.mlp.up_proj.weight"):
        Engine.from_pretrained(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00garbage")
    with pytest.raises(ValueError, match="cannot load a causal language model"):
        Engine.from_pretrained(str(tmp_path))


@pytest.mark.parametrize(("k", "depth"), [(0, 0), (0, 2), (1, 1), (3, 0), (3, 2), (7, 4)])
def test_every_decode_launch_carries_exactly_1_plus_k_positions_per_row(
    k: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last step before max_tokens, at every depth, with rows that end at different times."""
    model = tiny_model()
    config = EngineConfig(num_speculative_tokens=k, depth=depth, max_num_seqs=4, max_model_len=96, enforce_eager=True)
    plans: list[StepPlan] = []
    forwards: list[torch.Size] = []
    with Engine(model, config=config) as engine:
        launch, forward = engine._runner.launch, model.forward

        def recorded(plan: StepPlan) -> Any:
            plans.append(plan)
            return launch(plan)

        monkeypatch.setattr(engine._runner, "launch", recorded)

        def watched(*args: Any, **kwargs: Any) -> Any:
            forwards.append(kwargs["input_ids"].shape)
            return forward(*args, **kwargs)

        monkeypatch.setattr(model, "forward", watched)
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 2, 3, 5, 8, 21)]
        done = engine.generate([PROMPT] * 6, params, progress=False)
    assert [len(c.token_ids) for c in done] == [1, 2, 3, 5, 8, 21]
    decodes = [plan.decode for plan in plans if plan.decode is not None]
    assert decodes
    assert all(rows.num_draft == k for rows in decodes)
    shapes = [shape for shape in forwards if shape[0] != 1 or shape[1] == 1 + k]  # prefill is [1, T]
    assert {shape[1] for shape in shapes} <= {1 + k, *(plan.prefill.lengths.sum() for plan in plans if plan.prefill)}
    rows = sorted(engine._runner.graph_plan.ladder.pad(len(d.slots)) for d in decodes)
    prefills = [p for p in plans if p.prefill is not None]
    assert sum(s[0] * s[1] for s in forwards) == sum(rows) * (1 + k) + sum(
        int(p.prefill.lengths.sum()) for p in prefills if p.prefill is not None
    )


def test_stream_yields_tokens_as_they_come_and_leaves_other_requests_alone(engine: Engine) -> None:
    other = engine.add_request(PROMPT[::-1], SamplingParams(max_tokens=12, ignore_eos=True))
    pieces = list(engine.stream(PROMPT, SamplingParams(max_tokens=9, ignore_eos=True)))
    assert len(pieces) > 1
    assert sum(len(p.new_token_ids) for p in pieces) == 9
    assert [p.finish_reason for p in pieces][-1] == "length"
    rest = drain(engine)
    assert {o.request_id for o in rest} == {other}
    assert sum(len(o.new_token_ids) for o in rest) == 12


def test_a_stream_that_is_dropped_aborts_its_request(engine: Engine) -> None:
    stream = engine.stream(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not engine.has_unfinished_requests()
    engine.step()
    assert engine.stats().free_pages == 16


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
def test_abort_at_any_moment_frees_everything_and_disturbs_nobody(engine: Engine, steps: int) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    alone = engine.generate([PROMPT], params, progress=False)[0]
    victim, survivor = engine.add_request(PROMPT * 3, params), engine.add_request(PROMPT, params)
    outputs = [o for _ in range(steps) for o in engine.step()]
    assert engine.abort(victim)
    assert not engine.abort(victim)
    outputs += drain(engine)
    assert [o.finish_reason for o in outputs if o.request_id == victim][-1:] == ["abort"]
    assert [t for o in outputs if o.request_id == survivor for t in o.new_token_ids] == alone.token_ids
    while engine._pipeline.in_flight:
        engine.step()
    assert engine.stats().free_pages == 16
    assert not engine.abort("no such request")


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_nan_ends_one_request_with_an_error_and_the_others_go_on(depth: int) -> None:
    """One embedding row is poisoned: only the request that contains that token fails, and leaves nothing in the
    prefix cache (scenario 41)."""
    engine = Engine(tiny_model(), config=EngineConfig(max_model_len=64, page_size=4, max_num_seqs=4, depth=depth))
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    good = engine.generate([PROMPT], params, progress=False)[0].token_ids
    bad_token = next(t for t in range(3, VOCAB) if t not in PROMPT and t not in good)
    weight = engine._runner._model.module.get_input_embeddings().weight  # type: ignore[operator]
    weight[bad_token] = float("nan")
    sick, well = engine.generate([[*PROMPT, bad_token], PROMPT], params, progress=False)
    assert (sick.finish_reason, sick.token_ids) == ("error", [])
    engine.close()
    assert (well.finish_reason, well.token_ids) == ("length", good)


def test_a_launch_that_raises_ends_with_a_clear_error_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    with Engine(model) as engine:
        engine.add_request(PROMPT)

        def broken(*args: Any, **kwargs: Any) -> Any:
            raise ArithmeticError("the device caught fire")

        monkeypatch.setattr(model, "forward", broken)
        with pytest.raises(StreamError, match="the device caught fire"):
            drain(engine)


def test_after_a_failure_the_state_can_be_dumped(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    with Engine(model, config=EngineConfig(max_num_seqs=2, enforce_eager=True)) as engine:
        for _ in range(3):
            engine.add_request(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))
        for _ in range(3):
            engine.step()
        monkeypatch.setattr(model, "forward", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(StreamError, match="ZeroDivisionError"):
            drain(engine)
        state = json.loads(json.dumps(engine.dump_state()))
        assert state["waiting"] == ["2"]
        assert [r["request_id"] for r in state["running"]] == ["0", "1"]
        assert state["in_flight"][0]["decode_slots"] == [0, 1]
        assert state["last_graph_key"][:3] == ["decode", 2, 3]
        assert state["pages"]["available"] < engine.config.num_pages
        with pytest.raises(StreamError, match="failed earlier"):
            engine.step()


def test_the_watchdog_reports_a_launch_that_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model()
    stuck, forward = threading.Event(), model.forward
    monkeypatch.setattr(model, "forward", lambda *args, **kwargs: (stuck.wait(30), forward(*args, **kwargs))[1])
    stuck.set()  # the probe at start-up goes through
    with Engine(model, config=EngineConfig(watchdog_seconds=0.05)) as engine:
        stuck.clear()
        engine.add_request(PROMPT, SamplingParams(max_tokens=2))
        waiter = threading.Thread(target=drain, args=(engine,))
        with caplog.at_level(logging.ERROR, logger="graphspec"):
            waiter.start()
            while not caplog.records:
                waiter.join(0.01)
        stuck.set()
        waiter.join()
    message = caplog.records[0].getMessage()
    assert "has not come back" in message
    assert '"request_id": "0"' in message


def test_an_id_that_went_wrong_on_the_device_ends_one_request(engine: Engine) -> None:
    """A token id outside the vocabulary reaches no index (bug class D)."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    good = engine.generate([PROMPT], params, progress=False)[0].token_ids
    ids = [engine.add_request(PROMPT, params), engine.add_request(PROMPT[::-1], params)]
    outputs = [o for _ in range(3) for o in engine.step()]
    victim = engine._output_processor.unfinished[ids[1]][0].slot
    assert victim is not None
    state = engine._runner._state
    engine._runner.on_stream(lambda: state.last_token.__setitem__(victim, -1))
    outputs += drain(engine)
    ends = {o.request_id: o.finish_reason for o in outputs if o.finish_reason}
    assert ends == {ids[0]: "length", ids[1]: "error"}
    assert [t for o in outputs if o.request_id == ids[0] for t in o.new_token_ids] == good


def test_stop_strings_and_min_tokens_cut_text_and_usage_alike(tiny_checkpoint: Path) -> None:
    """Strings that span tokens, inside accepted runs of drafts, at several k (scenario 54)."""
    for k in (0, 4):
        config = EngineConfig(num_speculative_tokens=k, max_model_len=128, debug=True)
        with Engine.from_pretrained(str(tiny_checkpoint), config) as engine:

            def run(engine: Engine = engine, **params: Any) -> Completion:
                full = SamplingParams(max_tokens=40, ignore_eos=True, **params)
                return engine.generate(["abcabcabc"], full, progress=False)[0]

            free = run()
            at = next(i for i in range(8, 30) if free.text[i : i + 2].isascii() and free.text[i : i + 2].isprintable())
            stop = free.text[at : at + 2]
            first = free.text.index(stop)
            cut, kept = run(stop=[stop]), run(stop=[stop], include_stop_str_in_output=True)
            assert (cut.text, cut.finish_reason) == (free.text[:first], "stop")
            assert kept.text == free.text[: first + 2]
            assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
            assert stop in engine._input_processor._tokenizer.decode(cut.token_ids)
            assert stop not in engine._input_processor._tokenizer.decode(cut.token_ids[:-1])
            assert cut.usage.completion_tokens == len(cut.token_ids)
            pieces = [
                o.new_text
                for o in engine.stream("abcabcabc", SamplingParams(max_tokens=40, ignore_eos=True, stop=[stop]))
            ]
            assert "".join(pieces) == cut.text
            late = run(stop=[stop], min_tokens=40)
            assert (late.token_ids, late.finish_reason) == (
                free.token_ids,
                "length" if free.text[-2:] != stop else "stop",
            )


def test_the_prefix_cache_changes_nothing_but_the_work(engine: Engine) -> None:
    """A second turn reuses what the first computed, and its text is that of a fresh engine."""
    params = SamplingParams(max_tokens=14, ignore_eos=True)
    first = engine.generate([PROMPT], params, progress=False)[0]
    second_prompt = [*PROMPT, *first.token_ids, 11, 12]
    before = engine.stats().prefix_cache_hit_rate
    second = engine.generate([second_prompt], params, progress=False)[0]
    assert before == 0.0
    assert engine.stats().prefix_cache_hit_rate == pytest.approx(20 / (8 + 24))
    engine.reset_prefix_cache()
    assert engine.generate([second_prompt], params, progress=False)[0].token_ids == second.token_ids
    assert engine.stats().prefix_cache_hit_rate == pytest.approx(20 / (8 + 24 + 24))


def test_random_load_on_the_real_engine_gives_every_request_its_own_text() -> None:
    """Arrivals, aborts, cache resets and preemption: each text is that of an undisturbed synchronous run."""
    model, ties, scorer = tiny_model(), NearTies(), Scorer(tiny_model())
    rng = random.Random(3)
    for k, depth in ((0, 2), (3, 1), (5, 4)):
        requests: dict[str, tuple[list[int], SamplingParams]] = {}
        got: dict[str, list[int]] = {}
        reasons: dict[str, str | None] = {}
        config = EngineConfig(
            num_speculative_tokens=k, depth=depth, max_num_seqs=5, num_pages=20, page_size=4, max_model_len=64,
            max_prefill_tokens=16, debug=True,
        )  # fmt: skip
        with Engine(model, config=config) as engine:
            for _ in range(150):
                if rng.random() < 0.2 and len(engine._output_processor.unfinished) < 9:
                    prompt = [5, 6, 7, 8] * rng.randint(0, 3) + [
                        rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 6))
                    ]
                    sampled = rng.random() < 0.5
                    params = SamplingParams(
                        max_tokens=rng.randint(1, 40), temperature=0.8 * sampled, seed=len(requests)
                    )
                    requests[engine.add_request(prompt, params, priority=rng.randrange(2))] = (prompt, params)
                if rng.random() < 0.03 and engine._output_processor.unfinished:
                    engine.abort(rng.choice(list(engine._output_processor.unfinished)))
                if rng.random() < 0.02:
                    engine.reset_prefix_cache()
                for output in engine.step():
                    got.setdefault(output.request_id, []).extend(output.new_token_ids)
                    reasons[output.request_id] = output.finish_reason
            for output in drain(engine):
                got.setdefault(output.request_id, []).extend(output.new_token_ids)
                reasons[output.request_id] = output.finish_reason
            engine.drain()
            assert engine.stats().num_preemptions > 3
            assert engine.stats().free_pages == 20
        plain = EngineConfig(num_speculative_tokens=0, depth=0, max_num_seqs=1, max_model_len=64)
        with Engine(model, config=plain) as engine:
            for request_id, (prompt, params) in requests.items():
                expected = engine.generate([prompt], params, progress=False)[0].token_ids
                engine.reset_prefix_cache()
                if reasons[request_id] == "abort":
                    expected = expected[: len(got[request_id])]
                assert_same_text(scorer, prompt, expected, got[request_id], ties, params, params.seed or 0)
    ties.check()


def test_a_closed_engine_says_so(engine: Engine) -> None:
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.step()
    with pytest.raises(RuntimeError, match="closed"):
        engine.add_request(PROMPT)


def test_stop_ids_cut_a_text_exactly_and_usage_counts_what_was_returned(engine: Engine) -> None:
    free = engine.generate([PROMPT], SamplingParams(max_tokens=30, ignore_eos=True), progress=False)[0].token_ids
    for stop in sorted(set(free)):
        done = engine.generate(
            [PROMPT], SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=[stop]), progress=False
        )
        expected = free[: free.index(stop) + 1]
        assert (done[0].token_ids, done[0].finish_reason) == (expected, "stop")
        assert done[0].usage.completion_tokens == len(expected)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_waiting_for_requests_is_no_waiting_for_the_host(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that says to have been idle for a second before every launch: the first launch of each burst of
    requests does not count, all others do, those of a request that came while another one ran included."""
    monkeypatch.setattr(CpuEvent, "idle_before_seconds", lambda event: 1.0)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with Engine(tiny_model(), config=EngineConfig(depth=depth, max_num_seqs=2, max_model_len=64)) as engine:
        for _ in range(3):
            engine.generate([PROMPT], params, progress=False)
        assert engine._pipeline.times.total_idle == len(engine._pipeline.times.idle) == engine.stats().num_steps - 3
        engine.add_request(PROMPT, params)
        for _ in range(2):
            engine.step()
        assert engine.abort(engine.add_request(PROMPT, params))
        engine.generate([PROMPT], params, progress=False)
        assert engine._pipeline.times.total_idle == engine.stats().num_steps - 4
