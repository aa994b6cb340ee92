"""The launches in flight, oldest first, and the one place where the host waits for the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from graphs import StreamError
from graphspec.engine.stats import LoopTimes
from graphspec.engine.watchdog import Watchdog
from graphspec.execution.runner import Launched, Runner
from graphspec.records.launch import StepPlan, StepResult


class LaunchPipeline:
    """Launches plans on `runner` and takes their answers in the same order. `watchdog` reports a wait that takes too
    long. After a launch has failed nothing more can be launched: `check` says so."""

    def __init__(self, runner: Runner, watchdog: Watchdog | None) -> None:
        self.in_flight: deque[Launched] = deque()
        self.times = LoopTimes()
        self._runner, self._watchdog = runner, watchdog
        self._failure: StreamError | None = None

    def check(self) -> None:
        """Raise `StreamError` if a launch has failed."""
        if self._failure is not None:
            raise StreamError("the engine failed earlier: look at dump_state() and create a new one") from self._failure

    def launch(self, plan: StepPlan) -> None:
        self.in_flight.append(self._runner.launch(plan))

    def num_due(self, depth: int, *, is_stalled: bool) -> int:
        """Answers to take now: those that make room for `depth` launches in flight. If nothing could be launched the
        oldest is always due, since only its answer can change that."""
        return min(max(len(self.in_flight) - depth, int(is_stalled)), len(self.in_flight))

    def take_answer(self) -> tuple[StepPlan, StepResult]:
        """Wait for the oldest launch in flight and read its answer back. Raises `StreamError` if it failed; it then
        stays in flight, for `Engine.dump_state`."""
        oldest = self.in_flight[0]
        self._wait(oldest)
        self.in_flight.popleft()
        return oldest.plan, oldest.result()

    def _wait(self, launched: Launched) -> None:
        """The only place where the host waits for the device."""
        started = time.perf_counter()
        try:
            with self._watchdog or nullcontext():
                launched.event.wait()
        except StreamError as failure:
            self._failure = failure
            raise
        self.times.total_wait += time.perf_counter() - started
        idle = None if launched.plan.after_idle else launched.event.idle_before_seconds()
        self.times.record_launch(launched.event.busy_seconds(), idle)

    @contextmanager
    def host_work(self) -> Iterator[None]:
        """Times one `Engine.step`; what it waits for the device is left out."""
        started, waited = time.perf_counter(), self.times.total_wait
        yield
        self.times.host.append(time.perf_counter() - started - (self.times.total_wait - waited))

    def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
