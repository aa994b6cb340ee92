"""The CPU stream behaves like a CUDA stream, and the bucket ladder holds every row count."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from functools import partial

import pytest
import torch

from graphs.key import BucketLadder
from graphs.stream import CpuStream, StreamError

TIMEOUT = 10.0  # of a wait that a correct stream never reaches


class Gate:
    """Work that starts, says so, and goes on when it is told to."""

    def __init__(self) -> None:
        self.started, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.started.set()
        assert self.opened.wait(TIMEOUT)


def fail() -> None:
    raise ValueError("page 7 is missing")


def test_submit_returns_before_the_work_ends_and_work_runs_in_order() -> None:
    stream, gate, order = CpuStream(), Gate(), list[int]()
    first = stream.submit(gate)
    events = [stream.submit(partial(order.append, i)) for i in range(50)]
    assert gate.started.wait(TIMEOUT)
    assert not any(event.query() for event in (first, *events))  # the host is here while the work runs
    assert order == []
    gate.opened.set()
    events[20].wait()
    assert order[:21] == list(range(21))
    assert all(event.query() for event in (first, *events[:21]))
    stream.synchronize()
    assert order == list(range(50))
    stream.close()


def test_an_event_waits_for_its_own_work_only() -> None:
    stream, gate = CpuStream(), Gate()
    before, blocked = stream.submit(lambda: None), stream.submit(gate)
    before.wait()
    assert not blocked.query()
    gate.opened.set()
    stream.close()


def test_an_error_names_the_original_and_is_sticky() -> None:
    stream, ran = CpuStream(), list[int]()
    good, bad = stream.submit(lambda: ran.append(0)), stream.submit(fail)
    later = stream.submit(lambda: ran.append(1))
    good.wait()
    for event in (bad, later, later):  # waiting again says the same
        with pytest.raises(StreamError, match="page 7 is missing") as caught:
            event.wait()
        assert isinstance(caught.value.__cause__, ValueError)
        assert event.query()
    with pytest.raises(StreamError, match="page 7 is missing"):
        stream.synchronize()
    stream.close()
    assert ran == [0]  # nothing runs on a broken device
    good.wait()  # what was over before the error stays good


def test_close_finishes_what_was_submitted_and_may_be_called_twice() -> None:
    stream, gate, order = CpuStream(), Gate(), list[int]()
    events = [stream.submit(gate), *(stream.submit(partial(order.append, i)) for i in range(5))]
    gate.opened.set()
    stream.close()
    stream.close()
    assert order == list(range(5))
    assert all(event.query() for event in events)


def test_a_closed_stream_refuses_work() -> None:
    stream = CpuStream()
    stream.close()
    with pytest.raises(StreamError, match="closed"):
        stream.submit(lambda: None)
    with pytest.raises(StreamError, match="closed"):
        stream.synchronize()


def test_closing_a_broken_stream_does_not_raise() -> None:
    stream = CpuStream()
    event = stream.submit(fail)
    stream.close()
    with pytest.raises(StreamError):
        event.wait()


def test_work_runs_on_one_worker_thread_without_grad_and_with_its_own_thread_count() -> None:
    seen = list[tuple[int, bool, int]]()
    stream = CpuStream(num_threads=1)

    def look() -> None:
        seen.append((threading.get_ident(), torch.is_grad_enabled(), torch.get_num_threads()))

    with torch.enable_grad():
        for _ in range(3):
            stream.submit(look)
        stream.synchronize()
        assert torch.is_grad_enabled()
    stream.close()
    assert len(set(seen)) == 1
    ident, grad, threads = seen[0]
    assert ident != threading.get_ident()
    assert (grad, threads) == (False, 1)


def test_times_are_not_negative_and_fit_into_the_life_of_the_stream() -> None:
    before = time.perf_counter()
    stream = CpuStream()
    events = [stream.submit(lambda: None) for _ in range(20)]
    stream.close()
    life = time.perf_counter() - before
    times = [seconds for event in events for seconds in (event.busy_seconds(), event.idle_before_seconds())]
    assert min(times) >= 0
    assert sum(times) <= life


def test_a_finished_launch_is_not_kept_alive_by_a_waiting_worker() -> None:
    stream, work, gone = CpuStream(), Gate(), threading.Event()
    work.opened.set()
    reference = weakref.ref(work, lambda _: gone.set())
    stream.submit(work).wait()
    del work
    assert gone.wait(TIMEOUT), gc.get_referrers(reference())
    stream.close()


@pytest.mark.parametrize("maximum", range(1, 70))
def test_a_ladder_holds_every_count_with_at_most_half_padding(maximum: int) -> None:
    ladder = BucketLadder.up_to(maximum)
    assert ladder.rungs[-1] == maximum
    for rows in range(1, maximum + 1):
        assert ladder.pad(rows) == min(rung for rung in ladder.rungs if rung >= rows)
        assert rows <= ladder.pad(rows) <= 2 * rows
    assert {ladder.pad(rows) for rows in range(1, maximum + 1)} == set(ladder.rungs)  # no graph is captured in vain


def test_a_ladder_of_ones_own_pads_up_to_its_rungs() -> None:
    ladder = BucketLadder((2, 5, 9))
    assert [ladder.pad(rows) for rows in range(1, 10)] == [2, 2, 5, 5, 5, 9, 9, 9, 9]


@pytest.mark.parametrize("rows", [-1, 0, 10])
def test_a_count_outside_the_ladder_is_an_error(rows: int) -> None:
    with pytest.raises(ValueError, match=f"{rows} rows do not fit"):
        BucketLadder((2, 5, 9)).pad(rows)


@pytest.mark.parametrize("rungs", [(), (0, 1), (-1, 4), (3, 2), (1, 2, 2), (1, 4, 3)])
def test_bad_ladders_are_rejected(rungs: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending positive rungs"):
        BucketLadder(rungs)
