"""A closed loop of requests: as many as `concurrency` are in the engine at any time, the next one arrives when one
ends. And what it measures of an engine.

    TTFT   time to first token, from arrival, seconds
    TPOT   time per output token after the first: (last - first) / (tokens - 1), per request
    ITL    time between two outputs of a request, of one or more tokens each: a step
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphspec.commands.bench.decode_load import rest
from graphspec.commands.bench.step_parts import wrapped
from graphspec.engine.engine import Engine
from graphspec.records.launch import StepPlan, StepResult
from graphspec.records.sampling_params import SamplingParams

Launch = tuple[StepPlan, StepResult]


@dataclass
class Served:
    """What one run of the load gave."""

    seconds: float
    token_ids: list[list[int]]
    launches: list[Launch]
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def serve(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    concurrency: int,
    on_finished: Callable[[], Any] = lambda: None,
) -> Served:
    """Run the load once. Nothing of it stays in the engine: the prefix cache is emptied."""
    launches: list[Launch] = []

    def committing(commit: Callable[..., Any], plan: StepPlan, result: StepResult) -> Any:
        launches.append((plan, result))
        return commit(plan, result)

    before, started = totals(engine), time.perf_counter()
    waiting, order = list(prompts), []
    arrived: dict[str, float] = {}
    times: dict[str, list[float]] = {}
    tokens: dict[str, list[int]] = {}
    running = 0
    with wrapped(engine._scheduler, "commit", committing):
        while waiting or running:
            while waiting and running < concurrency:
                request_id = engine.add_request(waiting.pop(0), params)
                arrived[request_id] = time.perf_counter()
                times[request_id], tokens[request_id] = [], []
                order.append(request_id)
                running += 1
            for output in engine.step():
                if output.new_token_ids:
                    times[output.request_id].append(time.perf_counter())
                    tokens[output.request_id] += output.new_token_ids
                if output.finished:
                    running -= 1
                    on_finished()
        served = Served(time.perf_counter() - started, [tokens[i] for i in order], launches)
    engine.drain()
    for i in order:
        served.ttft.append(times[i][0] - arrived[i])
        served.itl += [b - a for a, b in zip(times[i], times[i][1:], strict=False)]
        if len(tokens[i]) > 1:
            served.tpot.append((times[i][-1] - times[i][0]) / (len(tokens[i]) - 1))
    served.counts = {name: value - before[name] for name, value in totals(engine).items()}
    engine.reset_prefix_cache()
    rest(engine)
    return served


def totals(engine: Engine) -> dict[str, float]:
    """Counters of an engine since it was created."""
    stats, times = engine.stats(), engine._pipeline.times
    return {
        "num_drafts": stats.num_drafts,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "wasted_positions": stats.wasted_positions,
        "off_graph_decode_steps": stats.off_graph_decode_steps,
        "busy": times.total_busy,
        "idle": times.total_idle,
    }


def capture_graphs(engine: Engine, sampler: str) -> None:
    """Warm up: every row count has its graph of this kind."""
    step = engine._runner.decode_step
    if engine.config.user.enforce_eager:
        return
    keys = [key for key in engine._runner.graph_plan.all_keys() if key.sampler == sampler and key not in step.store]

    def capture() -> None:
        for key in keys:
            step.capture(key)

    engine._runner.on_stream(capture)
    rest(engine)
