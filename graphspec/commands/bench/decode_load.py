"""A steady load of decode steps: some rows, all decoding, each with a prompt of a given length behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from graphs.stream import release_openmp_team
from graphspec.engine.engine import Engine
from graphspec.records.sampling_params import SamplingParams
from graphspec.scheduling.slot_table import PREFILL

MARGIN = 8  # launches of a turn that are not measured: they fill the pipeline, or were made ahead


@dataclass(frozen=True)
class Turn:
    """Seconds of successive decode steps, and what they gave."""

    busy: list[float]  # device computing one launch
    idle: list[float]  # device waiting for the host before one launch
    host: list[float]  # host work of one `Engine.step`, the wait left out
    num_emitted: int

    def emitted_per_row(self, rows: int) -> float:
        """Tokens that one row gave per step."""
        return self.num_emitted / (rows * len(self.busy))


def prompts_of(rows: int, length: int, vocab_size: int) -> list[list[int]]:
    """Token ids of no meaning. Shorter prompts begin longer ones, so that cached prefixes are worth most."""
    return [[5 + (7 * i + (j * j) % 997) % (vocab_size - 10) for j in range(length)] for i in range(rows)]


def tokens_needed(num_draft: int, steps: int) -> int:
    """Output tokens for which a request decodes throughout a turn of `steps`, whatever is accepted."""
    return (steps + MARGIN) * (1 + num_draft)


@contextmanager
def decoding(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> Iterator[None]:
    """Inside, every step is a decode step of these requests alone."""
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    try:
        step_until_all_decode(engine)
        for _ in range(2 + engine.config.user.depth):  # the first one captures the graph
            engine.step()
        yield
    finally:
        for request_id in ids:
            engine.abort(request_id)
        while engine.has_unfinished_requests():
            engine.step()
        engine.drain()
        rest(engine)


def timed_steps(engine: Engine, steps: int) -> Turn:
    """Run `steps` steps inside `decoding`."""
    times = engine._pipeline.times
    for series in (times.busy, times.idle, times.host):
        series.clear()
    emitted = sum(len(output.new_token_ids) for _ in range(steps) for output in engine.step())
    return Turn(list(times.busy), list(times.idle), list(times.host), emitted)


def set_depth(engine: Engine, depth: int) -> None:
    """Run ahead by `depth` from now on, at most by what the engine was made for: its arrays are enough for less. One
    engine then serves all depths on the same graphs and buffers."""
    assert not engine._pipeline.in_flight
    engine.config = replace(engine.config, user=replace(engine.config.user, depth=depth))


def step_until_all_decode(engine: Engine) -> None:
    """Until no request waits or has prompt left to compute."""
    while engine._scheduler.waiting or (engine._scheduler.table.phase == PREFILL).any():
        engine.step()


def rest(engine: Engine) -> None:
    """At the end of a turn: an engine that waits while others are measured keeps no OpenMP threads. Those of all count,
    and with more of them than cores every parallel region sleeps at its barriers, see `release_openmp_team`."""
    engine._runner.on_stream(release_openmp_team)
