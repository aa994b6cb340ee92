"""The scheduler against a fake pipelined device: random load, every invariant after every event."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from fake_runner import VOCAB, FakeRunner, true_token

from graphspec.request import Request, SamplingParams
from graphspec.scheduler import Scheduler, SchedulerConfig
from graphspec.slots import FREE


def scheduler_for(
    k: int, *, num_pages: int = 64, page_size: int = 4, max_num_seqs: int = 4, budget: int = 16, lookahead: int = 0
) -> Scheduler:
    width = num_pages + 40
    return Scheduler(SchedulerConfig(max_num_seqs, budget, k, lookahead, page_size, num_pages, width))


def request_of(number: int, prompt: int, max_tokens: int, stop_ids: frozenset[int] = frozenset()) -> Request:
    return Request(
        request_id=str(number),
        prompt_ids=[3] * prompt,
        params=SamplingParams(max_tokens=max_tokens),
        seed=number,
        arrival=number,
        limit=prompt + max_tokens,
        stop_ids=stop_ids,
    )


def run_until_idle(scheduler: Scheduler, runner: FakeRunner, depth: int) -> None:
    for _ in range(10_000):
        plan = scheduler.next()
        if plan is not None:
            runner.launch(plan)
        if runner.in_flight and (plan is None or len(runner.in_flight) > depth):
            runner.answer()
        scheduler.check(runner.plans)
        if not scheduler.has_requests() and not runner.in_flight:
            return
    raise AssertionError("no progress")


def assert_idle(scheduler: Scheduler) -> None:
    table = scheduler.table
    assert scheduler.pool.num_free == scheduler.pool.num_pages
    assert (table.phase == FREE).all()
    assert table.num_unused == table.num_slots
    assert not table.placeholders.any()
    assert not table.sampling.any()
    assert (table.page_table == table.scratch_page).all()


class RandomLoad:
    """Plays random events: arrivals, launches, late answers with random acceptance, aborts."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random
        self.k, self.depth = pick.randrange(8), pick.randrange(5)
        # A pool of 12 pages of 4 tokens is far too small for 5 requests of up to 46 tokens: preemption is the rule.
        self.scheduler = scheduler_for(
            self.k,
            num_pages=pick.choice([12, 16, 64]),
            max_num_seqs=pick.randint(1, 5),
            budget=pick.choice([1, 5, 16, 64]),
            lookahead=pick.choice([0, max(0, self.k - 1)]),
        )
        self.runner = FakeRunner(self.scheduler, pick.randrange(1 << 30), pick.choice([0.0, 0.3, 0.7, 1.0]))
        self.requests: list[Request] = []
        self.events = 0

    def arrive(self) -> None:
        pick = self.random
        stop_ids = frozenset(pick.sample(range(3, VOCAB), pick.choice([0, 0, 0, 2])))
        request = request_of(len(self.requests), pick.randint(1, 16), pick.randint(1, 30), stop_ids)
        self.requests.append(request)
        self.scheduler.add(request)

    def abort(self) -> None:
        alive = [r for r in self.requests if r.finish_reason is None]
        if alive:
            self.scheduler.abort(self.random.choice(alive))

    def step(self) -> None:
        plan = self.scheduler.next()
        if plan is not None:
            if plan.decode is not None:
                assert plan.decode.num_draft == self.k
            self.runner.launch(plan)
        if self.runner.in_flight and (plan is None or len(self.runner.in_flight) > self.depth):
            self.runner.answer()

    def play(self, events: int) -> None:
        for _ in range(events):
            weights = (1, 12, 0.3) if len(self.scheduler.waiting) < 6 else (0, 12, 0.5)
            self.random.choices((self.arrive, self.step, self.abort), weights)[0]()
            self.scheduler.check(self.runner.plans)
            self.events += 1
        run_until_idle(self.scheduler, self.runner, self.depth)
        assert_idle(self.scheduler)
        for request in self.requests:
            self.check_end(request)

    def check_end(self, request: Request) -> None:
        start, out = len(request.prompt_ids), request.output_ids
        truth = [true_token(request.seed, start + i) for i in range(request.params.max_tokens)]
        stop = next((i for i, t in enumerate(truth) if t in request.stop_ids), None)
        if request.finish_reason == "abort":
            assert out == truth[: len(out)]
        elif stop is not None:
            assert (request.finish_reason, out) == ("stop", truth[: stop + 1])
        else:
            assert (request.finish_reason, out) == ("length", truth)


def test_random_load_keeps_every_invariant() -> None:
    """100,000 events over depth 0-4 and k 0-7. A failure names the seed that replays it."""
    events = preempted = wasted = 0
    seed = 0
    while events < 100_000:
        load = RandomLoad(seed)
        try:
            load.play(500)
        except AssertionError as failure:
            raise AssertionError(f"RandomLoad({seed}), k={load.k}, depth={load.depth}: {failure}") from failure
        events += load.events
        preempted += load.scheduler.stats.num_preemptions
        wasted += load.scheduler.stats.wasted_positions
        seed += 1
    assert preempted > 1000  # or the small pools did not do their work
    assert wasted > 1000


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_no_launch_that_even_full_rejection_would_make_useless(max_tokens: int, k: int) -> None:
    """With nothing accepted, exactly max_tokens - 1 decode launches follow the prefill, each of 1 + k positions."""
    scheduler = scheduler_for(k)
    runner = FakeRunner(scheduler, 0, acceptance=0.0)
    request = request_of(0, 7, max_tokens)
    scheduler.add(request)
    widths = []
    while (plan := scheduler.next()) is not None or runner.in_flight:
        if plan is not None:
            if plan.decode is not None:
                widths.append(len(plan.decode.slots) * (1 + plan.decode.num_draft))
            runner.launch(plan)
        if plan is None or len(runner.in_flight) > 2:
            runner.answer()
    assert widths == [1 + k] * (max_tokens - 1)
    assert len(request.output_ids) == max_tokens
    assert scheduler.stats.wasted_positions == 0
    assert_idle(scheduler)


def test_decode_rows_do_not_wait_for_the_prefill_budget() -> None:
    scheduler = scheduler_for(3, budget=1, num_pages=64)
    runner = FakeRunner(scheduler, 0, acceptance=0.5)
    scheduler.add(request_of(0, 2, 30))
    for _ in range(2):
        plan = scheduler.next()
        assert plan is not None
        runner.launch(plan)
        runner.answer()
    scheduler.add(request_of(1, 20, 4))
    for _ in range(8):  # the budget is one token, and yet the decode row is in every launch, whole
        plan = scheduler.next()
        assert plan is not None
        assert plan.decode is not None
        assert plan.prefill is not None
        assert (plan.decode.num_draft, plan.prefill.lengths.tolist()) == (3, [1])
        runner.launch(plan)
        runner.answer()


def test_pages_return_only_behind_the_fence() -> None:
    scheduler = scheduler_for(3)
    runner = FakeRunner(scheduler, 0, acceptance=0.0)
    request = request_of(0, 7, 10)
    scheduler.add(request)
    for _ in range(3):
        plan = scheduler.next()
        assert plan is not None
        runner.launch(plan)
    owned = scheduler.pool.num_pages - scheduler.pool.num_free
    scheduler.abort(request)
    for left in (2, 1, 0):
        assert scheduler.pool.num_fenced == owned
        runner.answer()
        assert len(runner.in_flight) == left
    assert_idle(scheduler)
    assert request.output_ids == []


def test_a_released_slot_ignores_answers_of_its_previous_owner() -> None:
    scheduler = scheduler_for(3, max_num_seqs=1)
    runner = FakeRunner(scheduler, 0, acceptance=1.0)
    old, new = request_of(0, 3, 20), request_of(1, 5, 20)
    scheduler.add(old)
    for _ in range(3):
        plan = scheduler.next()
        assert plan is not None
        runner.launch(plan)
    scheduler.abort(old)
    scheduler.add(new)
    plan = scheduler.next()
    assert plan is not None
    assert [a.slot for a in plan.admissions] == [0]  # the slot is reused while its old launches are in flight
    runner.launch(plan)
    for _ in range(3):
        runner.answer()
    assert scheduler.stats.wasted_positions == 1 + 4 + 4  # first token of the prefill, two decode rows
    run_until_idle(scheduler, runner, depth=4)
    assert old.output_ids == []
    assert len(new.output_ids) == 20


def test_the_youngest_request_yields_its_pages_and_loses_nothing() -> None:
    scheduler = scheduler_for(1, num_pages=8, page_size=4, max_num_seqs=2)
    runner = FakeRunner(scheduler, 0, acceptance=0.5)
    first, second = request_of(0, 8, 20), request_of(1, 8, 20)
    scheduler.add(first)
    scheduler.add(second)
    run_until_idle(scheduler, runner, depth=2)
    assert first.num_preemptions == 0
    assert second.num_preemptions > 0
    for request in (first, second):
        assert request.output_ids == [true_token(request.seed, 8 + i) for i in range(20)]


def test_next_scales_with_rows_not_with_objects() -> None:
    """256 running requests: no per-row Python in `next` beyond the plan itself (a smoke test prints the time)."""
    scheduler = scheduler_for(3, num_pages=8192, page_size=16, max_num_seqs=256, budget=65536)
    runner = FakeRunner(scheduler, 0, acceptance=0.5)
    for i in range(256):
        scheduler.add(request_of(i, 64, 200))
    for _ in range(3):
        plan = scheduler.next()
        assert plan is not None
        runner.launch(plan)
        runner.answer()
    started = time.perf_counter()
    plan = scheduler.next()
    print(f"next() with 256 rows: {1e6 * (time.perf_counter() - started):.0f} us")
    assert plan is not None
    assert plan.decode is not None
    assert np.array_equal(plan.decode.slots, np.arange(256))
