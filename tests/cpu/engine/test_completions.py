"""n completions of one prompt: one id, pages shared, noise of their own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from conftest import byte_tokenizer, tiny_model

from graphspec import AsyncEngine, Completion, Engine, EngineConfig, SamplingParams

PROMPT = [5, 6, 7, 8, 9, 10] * 4
SEEDED = SamplingParams(n=4, max_tokens=20, temperature=1.0, seed=11, ignore_eos=True)


def run(params: SamplingParams, prompts: list[list[int]] | None = None, **config: Any) -> list[Completion]:
    config = {"max_model_len": 96, "page_size": 8, **config}
    with Engine(tiny_model(), config=EngineConfig(**config)) as engine:
        return engine.generate(prompts or [PROMPT], params, progress=False)


def test_each_is_a_draw_of_its_own_and_the_first_is_that_of_n_1() -> None:
    done = run(SEEDED)
    assert [c.index for c in done] == [0, 1, 2, 3]
    assert {(c.request_id, c.seed) for c in done} == {("0", 11)}
    assert len({tuple(c.token_ids) for c in done}) == 4
    one = run(SamplingParams(max_tokens=20, temperature=1.0, seed=11, ignore_eos=True))
    assert one[0].token_ids == done[0].token_ids


@pytest.mark.parametrize(
    "config", [{"num_speculative_tokens": 0, "depth": 0}, {"depth": 3, "max_num_seqs": 2}, {"num_pages": 9}], ids=str
)
def test_the_texts_do_not_depend_on_how_they_run(config: dict[str, Any]) -> None:
    assert [c.token_ids for c in run(SEEDED, **config)] == [c.token_ids for c in run(SEEDED)]


@pytest.mark.parametrize("budget", [1024, 10])
def test_the_pages_of_the_prompt_are_computed_once(budget: int) -> None:
    """In the very launch that computes them, or in a later one; the last token is always computed."""
    config = EngineConfig(max_model_len=96, page_size=8, max_prefill_tokens=budget, debug=True)
    with Engine(tiny_model(), config=config) as engine:
        engine.generate([PROMPT], SEEDED, progress=False)
        assert engine.stats().prefix_cache_hit_rate == pytest.approx(3 * 16 / (4 * len(PROMPT)))


def test_several_prompts_come_back_in_order() -> None:
    prompts = [PROMPT, PROMPT[::-1], [3]]
    done = run(SEEDED, prompts)
    assert [(c.request_id, c.index) for c in done] == [(str(r), i) for r in range(3) for i in range(4)]
    assert [c.token_ids for c in done[4:8]] == [c.token_ids for c in run(SEEDED, prompts[1:2])]


def test_a_request_is_finished_when_its_last_completion_is() -> None:
    with Engine(tiny_model(), config=EngineConfig(max_model_len=96, max_num_seqs=3)) as engine:
        request_id = engine.add_request(PROMPT, SEEDED)
        outputs = [o for _ in range(400) if engine.has_unfinished_requests() for o in engine.step()]
        assert {o.request_id for o in outputs} == {request_id}
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        assert sorted(o.index for o in outputs if o.finish_reason) == [0, 1, 2, 3]
        assert list(engine.stream(PROMPT, SEEDED))[-1].finished


def test_an_abort_ends_all_that_have_not_ended() -> None:
    with Engine(tiny_model(), config=EngineConfig(max_model_len=96, max_num_seqs=3)) as engine:
        request_id = engine.add_request(PROMPT, SEEDED)
        other = engine.add_request(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))
        outputs = [o for _ in range(4) for o in engine.step()]
        assert engine.abort(request_id)
        assert not engine.abort(request_id)
        while engine.has_unfinished_requests():
            outputs += engine.step()
        ends = [(o.request_id, o.finish_reason) for o in outputs if o.finish_reason]
        assert sorted(ends) == [(request_id, "abort")] * 4 + [(other, "length")]
        engine.drain()
        assert engine.stats().num_running == 0


def test_an_asyncio_program_gets_all_of_them() -> None:
    async def main() -> list[tuple[int, list[int]]]:
        engine = Engine(tiny_model(), byte_tokenizer(), EngineConfig(max_model_len=96, page_size=8))
        async with AsyncEngine(engine) as wrapped:
            return [(o.index, o.new_token_ids) async for o in wrapped.generate(PROMPT, SEEDED)]

    pieces = asyncio.run(main())
    texts = [[t for index, ids in pieces if index == i for t in ids] for i in range(4)]
    assert texts == [c.token_ids for c in run(SEEDED)]


def test_greedy_completions_would_all_be_the_same() -> None:
    with pytest.raises(ValueError, match="n > 1 needs temperature > 0"):
        SamplingParams(n=2)
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        SamplingParams(n=0)
