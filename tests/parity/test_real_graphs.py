"""The built-in model on captured graphs: every decode step replays one, and does bit for bit what the eager step does.

`make test` runs one cell, `make parity` all of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphs import Difference, compare_replay
from graphspec import Engine, EngineConfig, SamplingParams
from graphspec.commands.prompt_files import BUILTIN_PROMPTS, read_prompts
from graphspec.execution.iteration import DecodeInputs
from graphspec.models.builtin import NAME

MAX_NUM_SEQS = 8
PROMPTS = read_prompts(BUILTIN_PROMPTS)


def serve(batch: int, **config: Any) -> tuple[list[list[int]], Engine]:
    """`batch` requests at once, arriving in turn, some of which end early and some at max_model_len; depth 0, so that
    two engines make the same launches."""
    common: dict[str, Any] = {"max_num_seqs": MAX_NUM_SEQS, "depth": 0, "max_model_len": 96, "max_prefill_tokens": 40}
    engine = Engine.from_pretrained(NAME, EngineConfig(**common, **config))
    waiting = [
        (
            prompt[:150],
            SamplingParams(max_tokens=(5, 12, 200)[i % 3], temperature=0.7 * (i % 2), seed=i, ignore_eos=True),
        )
        for i, prompt in enumerate(PROMPTS[: 2 * batch])
    ]
    tokens: dict[str, list[int]] = {}
    running = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and running < batch:
            tokens[engine.add_request(*waiting.pop(0))] = []
            running += 1
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
            running -= output.finish_reason is not None
    return list(tokens.values()), engine


@pytest.mark.parity
@pytest.mark.parametrize("batch", range(1, MAX_NUM_SEQS + 1))
def test_every_step_replays_a_graph_and_tokens_are_those_of_eager(batch: int) -> None:
    texts, engine = serve(batch)
    stats = engine.stats()
    engine.close()
    assert (stats.off_graph_decode_steps, stats.off_graph_reasons) == (0, {})
    expected, eager = serve(batch, enforce_eager=True)
    assert eager.stats().off_graph_decode_steps > 10
    eager.close()
    assert texts == expected


@pytest.mark.parametrize("k", [3, pytest.param(0, marks=pytest.mark.parity)])
def test_a_replay_equals_eager_in_every_op(k: int) -> None:
    """Logits included: each op of the step has the same bits."""
    config = EngineConfig(num_speculative_tokens=k, max_num_seqs=4, depth=0, max_model_len=256)
    with Engine.from_pretrained(NAME, config) as engine:
        for prompt in PROMPTS[:3]:
            engine.add_request(prompt[:200], SamplingParams(max_tokens=40, ignore_eos=True))
        for _ in range(5):
            engine.step()
        step, table = engine._runner.decode_step, engine._scheduler.table
        assert engine._runner.last_key is not None
        graph = step.store[engine._runner.last_key]
        slots = [slot for slot, request in enumerate(table.request) if request is not None]
        found: list[Difference | None] = []

        def work() -> None:
            step.stage(DecodeInputs(torch.tensor(slots), torch.from_numpy(table.page_table[slots])))
            found.append(compare_replay(graph))

        engine._runner.on_stream(work)
        assert len(slots) == 3
        assert found == [None]
