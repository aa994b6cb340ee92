"""The engine under asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from conftest import tiny_model

from graphspec import AsyncEngine, Engine, EngineConfig, SamplingParams

PROMPT = [5, 6, 7, 8, 9, 5, 6, 7]
TEN = SamplingParams(max_tokens=10, ignore_eos=True)


def engine(**config: Any) -> Engine:
    return Engine(tiny_model(), config=EngineConfig(max_model_len=128, max_num_seqs=4, debug=True, **config))


async def tokens_of(served: AsyncEngine, prompt: list[int], params: SamplingParams = TEN) -> list[int]:
    return [token async for output in served.generate(prompt, params) for token in output.new_token_ids]


def play(scene: Callable[[AsyncEngine], Awaitable[None]], max_pending: int = 64) -> None:
    """Run a scene against a fresh engine, with a limit that turns a hang into a failure."""

    async def run() -> None:
        async with AsyncEngine(engine(), max_pending) as served:
            await asyncio.wait_for(scene(served), timeout=60)

    asyncio.run(run())


def test_many_coroutines_get_their_own_text() -> None:
    prompts = [[3 + i, *PROMPT] for i in range(12)]
    with engine() as plain:
        expected = [c.token_ids for c in plain.generate(prompts, TEN, progress=False)]

    async def scene(served: AsyncEngine) -> None:
        assert await asyncio.gather(*(tokens_of(served, p) for p in prompts)) == expected

    play(scene)


def test_leaving_or_cancelling_an_iteration_aborts_the_request() -> None:
    async def scene(served: AsyncEngine) -> None:
        endless = SamplingParams(max_tokens=110, ignore_eos=True)
        stream = served.generate(PROMPT, endless)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        task = asyncio.create_task(tokens_of(served, PROMPT, endless))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(await tokens_of(served, PROMPT)) == 10
        while served._engine.has_unfinished_requests():
            await asyncio.sleep(0.01)
        assert not served._engine._scheduler.has_requests()

    play(scene)


def test_no_more_than_max_pending_requests_are_unfinished() -> None:
    async def scene(served: AsyncEngine) -> None:
        seen = []
        add = served._engine.add_request

        def counted(*args: Any, **kwargs: Any) -> str:
            seen.append(len(served._engine._output_processor.unfinished))
            return add(*args, **kwargs)

        served._engine.add_request = counted  # type: ignore[method-assign]
        await asyncio.gather(*(tokens_of(served, [3 + i, *PROMPT]) for i in range(8)))
        assert len(seen) == 8
        assert max(seen) < 2

    play(scene, max_pending=2)


def test_a_refused_request_raises_where_it_was_made_and_others_go_on() -> None:
    async def scene(served: AsyncEngine) -> None:
        good = asyncio.create_task(tokens_of(served, PROMPT))
        with pytest.raises(ValueError, match="prompt is empty"):
            await tokens_of(served, [])
        with pytest.raises(ValueError, match="no tokenizer"):
            await anext(served.generate("text"))
        assert len(await good) == 10

    play(scene)


def test_a_failing_engine_ends_every_iteration_with_the_reason() -> None:
    async def scene(served: AsyncEngine) -> None:
        def broken(*args: Any, **kwargs: Any) -> Any:
            raise ArithmeticError("the device caught fire")

        tasks = [asyncio.create_task(tokens_of(served, [3 + i, *PROMPT])) for i in range(3)]
        served._engine._runner._model.module.forward = broken
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, RuntimeError)
            assert "the device caught fire" in str(result)
        with pytest.raises(RuntimeError, match="the engine stopped"):
            await tokens_of(served, PROMPT)

    play(scene)


def test_closing_ends_what_is_unfinished() -> None:
    async def scene(served: AsyncEngine) -> None:
        task = asyncio.create_task(tokens_of(served, PROMPT, SamplingParams(max_tokens=110, ignore_eos=True)))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(served.close)
        with pytest.raises(RuntimeError, match="closed"):
            await task

    play(scene)
