"""Where the time of one step goes: clocks for the parts of a captured step, and for the host's.

The device. The parts of a step are told apart *inside* the captured graph: between them stands one more node that
takes the time. On the CPU it is an op of the dispatcher that reads the clock, so that it lies in the record like any
other; on CUDA it records an event that was made `external`, which a graph keeps as an event node. So eager steps,
recorded graphs, compiled ones and CUDA graphs are taken apart by the same means, while they do what they always do.
What it costs: a few microseconds per node, and a compiled step is cut at the nodes, so that nothing is fused across
parts. The total of the instrumented step is printed beside the time of the real one, which shows both.

A graph's events hold the times of its latest replay, so a step is taken apart at depth 0, where the host reads them
before it launches the next one.

The host. The functions that `Engine.step` calls are wrapped, each is charged with what the wrapped functions inside it
did not take, and what none of them took is "other": the parts add up to the time of the step.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from graphs import CapturedGraph, CudaStream
from graphspec.engine.engine import Engine
from graphspec.execution.iteration import DecodeInputs, Iteration, StepTensors
from graphspec.execution.runner import Launched
from graphspec.execution.staging import StagedStep

Parts = dict[str, float]  # seconds, in the order in which they happen

_numbers = itertools.count()


class StampedIteration(Iteration):
    """An iteration that says when it is over, too."""

    def decode(self, inputs: DecodeInputs, num_draft: int, num_draft_next: int, sampler: str) -> StepTensors:
        out = super().decode(inputs, num_draft, num_draft_next, sampler)
        self.part("read-back copies")
        return out


class DeviceClock:
    """Times of the parts of an engine's decode steps, while `attached`. The stamped graphs are its own."""

    def __init__(self, engine: Engine) -> None:
        self._runner, self._step = engine._runner, engine._runner.decode_step
        fields = {f.name: getattr(self._step._iteration, f.name) for f in dataclasses.fields(Iteration)}
        self._iteration = StampedIteration(**{**fields, "part": self._begin})
        self._graphs: dict[Any, CapturedGraph] = {}
        self._names: list[str] = []
        self._stamps: list[tuple[str, float]] = []  # of the launch that runs now, CPU
        self._events: dict[str, torch.cuda.Event] = {}  # of the latest launch, CUDA
        self._library = torch.library.Library("graphspec_bench", "FRAGMENT")  # type: ignore[no-untyped-call]
        name = f"stamp_{next(_numbers)}"
        self._library.define(f"{name}(int part) -> ()")  # type: ignore[no-untyped-call]
        self._library.impl(name, self._stamp, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        self._op = getattr(torch.ops.graphspec_bench, name).default
        self.steps: list[Parts] = []

    def _begin(self, part: str) -> None:
        """Put a stamp into the step that is being captured, or run it in one that is not."""
        if part not in self._names:
            self._names.append(part)
        self._op(self._names.index(part))

    def _stamp(self, part: int) -> None:
        name = self._names[part]
        if self._runner.device.type != "cuda":
            self._stamps.append((name, time.perf_counter()))
            return
        if name not in self._events:
            self._events[name] = torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
        self._events[name].record()

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, launches run the stamped step. Nothing may be in flight at either end."""
        step, store = self._step, self._step.store
        iteration, graphs = step._iteration, store._graphs
        step._iteration, store._graphs = self._iteration, self._graphs
        try:
            with ExitStack() as undo:
                for owner, name in ((store, "replay"), (store, "run_off_graph")):
                    undo.enter_context(wrapped(owner, name, self._entering))
                undo.enter_context(wrapped(self._runner._stream, "submit", self._submitting))
                yield
        finally:
            step._iteration, store._graphs = iteration, graphs

    def _entering(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._runner.device.type != "cuda":  # there it is host work: HostClock has it
            self._stamps = [("lookup + launch", time.perf_counter())]
        return function(*args)

    def _submitting(self, submit: Callable[..., Any], work: Callable[[], None]) -> Any:
        event = submit(work)
        event.wait()
        if isinstance(self._runner._stream, CudaStream):
            ends = [1e-3 * event.start.elapsed_time(stamp) for stamp in self._events.values()]
            stamps = list(zip(self._events, ends, strict=True))
            begin, end = 0.0, event.busy_seconds()
        else:
            stamps, begin, end = self._stamps, event._started, event._finished
        self.steps.append(parts_between(stamps, begin, end))
        return event


def parts_between(stamps: list[tuple[str, float]], begin: float, end: float) -> Parts:
    """From the times at which parts began to their lengths. What comes before the first one is "inputs": the step's
    inputs are copied to where it reads them. Parts of one name are added up."""
    begins = [("inputs", begin), *stamps]
    ends = [at for _, at in stamps] + [end]
    parts: Parts = {}
    for (name, started), ended in zip(begins, ends, strict=True):
        parts[name] = parts.get(name, 0.0) + ended - started
    return parts


class HostClock:
    """Times of the parts of `Engine.step` on the host, while `attached`. One entry of `steps` per call."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inside: list[float] = []  # per wrapped call under way: seconds spent in wrapped calls inside it
        self._now: Parts = {}
        self.steps: list[Parts] = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        engine, runner = self._engine, self._engine._runner
        parts: list[tuple[Any, str, str]] = [
            (engine._scheduler, "next", "schedule"),
            (runner._ring, "take", "staging"),
            *((staged, "fill_decode", "staging") for staged in _staging_sets(engine)),
            (runner, "launch", "submit"),
            (engine._pipeline, "_wait", "wait for the device"),
            (Launched, "result", "read-back"),
            (engine._scheduler, "commit", "commit"),
            (engine._output_processor, "process", "detokenise"),
        ]
        if runner.device.type == "cuda":  # on the CPU the worker does this
            parts += [(runner.decode_step, "stage", "inputs"), (runner.decode_step.store, "replay", "lookup + launch")]
        with ExitStack() as undo:
            for owner, name, part in parts:
                undo.enter_context(wrapped(owner, name, self._charging(part)))
            undo.enter_context(wrapped(engine, "step", self._stepping))
            yield

    def _charging(self, part: str) -> Callable[..., Any]:
        def charged(function: Callable[..., Any], *args: Any) -> Any:
            self._inside.append(0.0)
            started = time.perf_counter()
            try:
                return function(*args)
            finally:
                seconds = time.perf_counter() - started
                own = seconds - self._inside.pop()
                self._now[part] = self._now.get(part, 0.0) + own
                if self._inside:
                    self._inside[-1] += seconds

        return charged

    def _stepping(self, step: Callable[..., Any]) -> Any:
        self._now = {}
        outputs = self._charging("other")(step)
        self.steps.append(self._now)
        return outputs


def _staging_sets(engine: Engine) -> list[StagedStep]:
    return engine._runner._ring._sets


@contextmanager
def wrapped(owner: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Inside, `owner.name(*args)` is `around(owner.name, *args)`."""
    original = getattr(owner, name)
    own = name in vars(owner)
    setattr(owner, name, lambda *args: around(original, *args))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
