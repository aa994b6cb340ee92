"""Streams and events with one meaning on both devices: work runs in FIFO order, `submit` returns at once, an event
says when its work is over.

On CUDA a stream is a `torch.cuda.Stream`. On the CPU it is one worker thread, so that the host can schedule and
detokenise while the device computes, exactly as it does beside a GPU.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch


class StreamError(RuntimeError):
    """Work on a stream raised. Like a CUDA error it is sticky: every later event of the stream reports it."""


class Event(Protocol):
    """The end of one submitted piece of work."""

    def wait(self) -> None:
        """Block the host until the work is over. Raises `StreamError` if it, or work before it, failed."""

    def query(self) -> bool:
        """Whether the work is over, without blocking."""

    def busy_seconds(self) -> float:
        """Time from the start to the end of the work on the device. Call after `wait`."""

    def idle_before_seconds(self) -> float:
        """How long the device had nothing to do before this work started. Call after `wait`."""


class Stream(Protocol):
    """A FIFO of device work."""

    def submit(self, work: Callable[[], None]) -> Event:
        """Run `work` after everything submitted before it; return its event without waiting."""

    def synchronize(self) -> None:
        """Wait for everything submitted so far."""

    def close(self) -> None:
        """Finish what was submitted and release the stream. Closing twice is allowed."""


class CpuEvent:
    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._started = self._finished = self._idle = 0.0

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise StreamError(f"a launch failed on the device: {self._error!r}") from self._error

    def query(self) -> bool:
        return self._done.is_set()

    def busy_seconds(self) -> float:
        return self._finished - self._started

    def idle_before_seconds(self) -> float:
        return self._idle

    def _complete(self, started: float, idle: float, error: BaseException | None) -> None:
        self._started, self._idle, self._error = started, idle, error
        self._finished = time.perf_counter()
        self._done.set()


class CpuStream:
    """One daemon thread that runs submitted work in order.

    Grad mode and the intra-op thread count are thread-local in PyTorch, so the worker sets them itself.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads or torch.get_num_threads()
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], CpuEvent] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="graphspec-cpu-stream", daemon=True)
        self._closed = False
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> CpuEvent:
        if self._closed:
            raise StreamError("the stream is closed; create a new engine")
        event = CpuEvent()
        release_openmp_team()
        self._queue.put((work, event))
        return event

    def synchronize(self) -> None:
        self.submit(lambda: None).wait()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        torch.set_grad_enabled(False)
        error: BaseException | None = None
        idle_since = time.perf_counter()
        while (item := self._queue.get()) is not None:
            work, event = item
            started = time.perf_counter()
            idle = started - idle_since
            if error is None:
                try:
                    work()
                except BaseException as caught:  # handed to the host by this and every later event
                    error = caught
            event._complete(started, idle, error)
            idle_since = time.perf_counter()
            del item, work, event  # the worker must not keep a finished launch alive while it waits for the next


_OMP_PAUSE_HARD = 2
_openmp = ctypes.CDLL(None)


def release_openmp_team() -> None:
    """End the OpenMP workers of the calling thread, such as the host's; its next parallel region starts new ones.

    libgomp counts the threads of all teams, and with more of them than cores it stops spinning at barriers: every
    parallel region of the stream's thread then waits for a sleeping worker (measured on 2 cores: a 4 us bmm takes
    27 us, a decode step 1.3 times as long). Importing torch is enough to give the host thread a team. Costs nothing if
    there is none; does nothing with an OpenMP that lacks this OpenMP 5.0 call.
    """
    if hasattr(_openmp, "omp_pause_resource_all"):
        _openmp.omp_pause_resource_all(_OMP_PAUSE_HARD)


class CudaEvent:
    def __init__(self, previous_end: torch.cuda.Event | None) -> None:
        self._previous_end = previous_end
        self.start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        try:
            self.end.synchronize()
        except RuntimeError as caught:
            raise StreamError(f"a launch failed on the device: {caught}") from caught

    def query(self) -> bool:
        return bool(self.end.query())  # type: ignore[no-untyped-call]

    def busy_seconds(self) -> float:
        return float(self.start.elapsed_time(self.end)) * 1e-3

    def idle_before_seconds(self) -> float:
        return 0.0 if self._previous_end is None else float(self._previous_end.elapsed_time(self.start)) * 1e-3


class CudaStream:
    """A `torch.cuda.Stream`; `work` runs on the calling thread and enqueues kernels."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
        self._previous_end: torch.cuda.Event | None = None
        torch.cuda.synchronize(device)  # what other streams have made so far is complete before the first work

    def submit(self, work: Callable[[], None]) -> CudaEvent:
        event = CudaEvent(self._previous_end)
        with torch.no_grad(), torch.cuda.stream(self._stream):
            event.start.record(self._stream)
            work()
            event.end.record(self._stream)
        self._previous_end = event.end
        return event

    def synchronize(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self._stream.synchronize()


def create_stream(device: torch.device) -> Stream:
    """The stream that belongs to a device."""
    return CudaStream(device) if device.type == "cuda" else CpuStream()
