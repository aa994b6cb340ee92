"""The scheduler against a fake pipelined device: random load, every invariant after every event."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from fake_runner import VOCAB, FakeRunner, true_token

from graphspec.records.config import halving_tiers
from graphspec.records.detokenizer import IncrementalDetokenizer
from graphspec.records.launch import IntArray, StepPlan, StepResult
from graphspec.records.request import Request, rank_of
from graphspec.records.sampling_params import SamplingParams
from graphspec.scheduling.scheduler import Scheduler, SchedulerConfig
from graphspec.scheduling.slot_table import FREE


def scheduler_for(
    k: int,
    *,
    tiers: tuple[int, ...] = (),
    num_pages: int = 64,
    page_size: int = 4,
    max_num_seqs: int = 4,
    budget: int = 16,
    draft_model: bool = False,
) -> Scheduler:
    width, lookahead = num_pages + 40, max(0, k - 1) if draft_model else 0
    return Scheduler(
        SchedulerConfig(
            max_num_seqs,
            budget,
            tiers or (k,),
            lookahead,
            page_size,
            num_pages,
            width,
            reads_prompt=draft_model,
            drafts_ahead=not draft_model,
        )
    )


def request_of(
    number: int,
    prompt: int | list[int],
    max_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    *,
    priority: int = 0,
    **params: Any,
) -> Request:
    prompt_ids = [3] * prompt if isinstance(prompt, int) else prompt
    return Request(
        request_id=str(number),
        prompt_ids=prompt_ids,
        params=SamplingParams(max_tokens=max_tokens, **params),
        seed=number,
        rank=rank_of(priority, number),
        limit=len(prompt_ids) + max_tokens,
        stop_ids=stop_ids,
    )


class Harness:
    """A scheduler with its fake device."""

    def __init__(self, k: int, *, acceptance: float = 0.5, seed: int = 0, **limits: Any) -> None:
        self.scheduler = scheduler_for(k, **limits)
        self.requests: dict[int, Request] = {}
        self.runner = FakeRunner(self.scheduler, seed, acceptance, self.requests)

    def add(self, request: Request) -> Request:
        self.requests[request.seed] = request
        self.scheduler.add(request)
        return request

    def launch(self) -> StepPlan:
        plan = self.scheduler.next()
        assert plan is not None
        self.runner.launch(plan)
        self.scheduler.check(self.runner.plans)
        return plan

    def step(self, depth: int) -> StepPlan | None:
        """What the engine's loop does."""
        plan = self.scheduler.next()
        if plan is not None:
            self.runner.launch(plan)
        if self.runner.in_flight and (plan is None or len(self.runner.in_flight) > depth):
            self.runner.answer()
        self.scheduler.check(self.runner.plans)
        return plan

    def run(self, depth: int = 0) -> list[StepPlan]:
        """Until nothing is left, in flight neither."""
        plans = []
        for _ in range(10_000):
            if (plan := self.step(depth)) is not None:
                plans.append(plan)
            if not self.scheduler.has_requests() and not self.runner.in_flight:
                self.assert_idle()
                return plans
        raise AssertionError("no progress")

    def assert_idle(self) -> None:
        """Everything is back where it was; only cached content remains."""
        table, pool = self.scheduler.table, self.scheduler.pool
        assert pool.num_available == pool.num_pages
        assert (table.phase == FREE).all()
        assert table.num_free == table.num_slots
        for array in (
            table.placeholders,
            table.min_in_flight,
            table.settled,
            table.num_pages,
            table.cached_pages,
            table.published_pages,
        ):
            assert not array.any()
        self.scheduler.check([])
        assert (table.page_table == table.scratch_page).all()
        self.scheduler.reset_prefix_cache()
        assert (pool.num_known, len(pool._free), len(pool._page_of)) == (0, pool.num_pages, 0)


class ReversibleTokenizer:
    """Token t is the character chr(65 + t)."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(65 + t) for t in token_ids)


class RandomLoad(Harness):
    """Plays random events: arrivals with shared prefixes and follow-up turns, launches, late answers with random
    acceptance, aborts, cache resets, stops by id, string and length."""

    def __init__(self, seed: int) -> None:
        self.random = pick = random.Random(seed)
        self.depth = pick.randrange(5)
        k = pick.randrange(8)
        # A pool of 12 pages of 4 tokens is far too small for 5 requests of up to 46 tokens: preemption is the rule.
        super().__init__(
            k,
            acceptance=pick.choice([0.0, 0.3, 0.7, 1.0]),
            seed=pick.randrange(1 << 30),
            num_pages=pick.choice([12, 16, 64]),
            max_num_seqs=pick.randint(1, 5),
            budget=pick.choice([1, 5, 16, 64]),
            draft_model=pick.random() < 0.5,
            tiers=pick.choice([(k,), halving_tiers(k)]),
        )
        self.wanted = k
        self.scheduler.policy.choose = self.choose  # type: ignore[method-assign]
        self.k = k
        self.events = self.catch_ups = 0
        self.ks: set[int] = set()

    def choose(self, num_rows: int, speculating: IntArray) -> int:
        """Any tier, for a while."""
        if self.random.random() < 0.15:
            self.wanted = self.random.choice(self.scheduler.config.tiers)
        return self.wanted

    def arrive(self) -> None:
        pick, number = self.random, len(self.requests)
        ended = [r for r in self.requests.values() if r.finish_reason and r.num_tokens < 16]
        prompt = list(pick.choice(ended).token_ids) if ended and pick.random() < 0.3 else []  # the next turn
        prompt += [3] * pick.randint(0, 8) + [pick.randint(3, 5) for _ in range(pick.randint(0, 3))]
        max_tokens = pick.randint(1, 30)
        request = request_of(
            number,
            prompt[:18] or [4],
            max_tokens,
            frozenset(pick.sample(range(3, VOCAB), pick.choice([0, 0, 0, 2]))),
            priority=pick.choice([0, 0, 0, -1, 2]),
            min_tokens=pick.choice([0, 0, max_tokens // 2]),
            stop=pick.choice([[], [], ["Z", chr(65 + pick.randint(3, VOCAB))]]),
        )
        request.cache_salt = pick.choice(["", "", "other"])
        request.detokenizer = IncrementalDetokenizer(ReversibleTokenizer(), request.params.stop)
        self.add(request)

    def abort(self) -> None:
        alive = [r for r in self.requests.values() if r.finish_reason is None]
        if alive:
            self.scheduler.abort(self.random.choice(alive))

    def play(self, events: int) -> None:
        for _ in range(events):
            weights = (1, 12, 0.3, 0.05) if len(self.scheduler.waiting) < 6 else (0, 12, 0.5, 0.05)
            event = self.random.choices(("arrive", "step", "abort", "reset"), weights)[0]
            if event == "step":
                plan = self.step(self.depth)
                if plan is not None and plan.decode is not None:
                    self.ks.add(plan.decode.num_draft)
                self.catch_ups += plan is not None and plan.catch_up is not None
            elif event == "reset":
                self.scheduler.reset_prefix_cache()
            else:
                getattr(self, event)()
            self.scheduler.check(self.runner.plans)
            self.events += 1
        self.run(self.depth)
        for request in self.requests.values():
            check_end(request)


def check_end(request: Request) -> None:
    """The whole output and its finish reason, from the true text and the finish rules."""
    start, out, params = len(request.prompt_ids), request.output_ids, request.params
    truth = [true_token(request.seed, start + i) for i in range(params.max_tokens)]
    stops = {*request.stop_ids, *(ord(s) - 65 for s in params.stop)}
    stop = next((i for i, t in enumerate(truth) if t in stops and i + 1 >= params.min_tokens), None)
    if request.finish_reason == "abort":
        assert out == truth[: len(out)]
    elif stop is not None:
        assert (request.finish_reason, out) == ("stop", truth[: stop + 1])
    else:
        assert (request.finish_reason, out) == ("length", truth)


def test_random_load_keeps_every_invariant() -> None:
    """100,000 events over depth 0-4 and k 0-7, fixed or changing. A failure names the seed that replays it."""
    events = preempted = wasted = hits = resets = catch_ups = varied = 0
    seed = 0
    while events < 100_000:
        load = RandomLoad(seed)
        try:
            load.play(500)
        except AssertionError as failure:
            raise AssertionError(f"RandomLoad({seed}), k={load.k}, depth={load.depth}: {failure}") from failure
        stats = load.scheduler.stats
        events += load.events
        preempted += stats.num_preemptions
        wasted += stats.wasted_positions
        hits += stats.prefix_cache_hits
        catch_ups += load.catch_ups
        assert load.ks <= set(load.scheduler.config.tiers)
        varied += len(load.ks) > 2
        resets += load.scheduler.pool.generation - 1
        seed += 1
    # Or the load did not do its work:
    assert preempted > 500
    assert wasted > 1000
    assert hits > 10_000
    assert resets > 100
    assert catch_ups > 300
    assert varied > 30


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_no_launch_that_even_full_rejection_would_make_useless(max_tokens: int, k: int) -> None:
    """With nothing accepted, exactly max_tokens - 1 decode launches follow the prefill, each of 1 + k positions, with
    two launches in flight (scenario 1)."""
    harness = Harness(k, acceptance=0.0)
    request = harness.add(request_of(0, 7, max_tokens))
    plans = harness.run(depth=2)
    widths = [len(p.decode.slots) * (1 + p.decode.num_draft) for p in plans if p.decode is not None]
    assert widths == [1 + k] * (max_tokens - 1)
    assert len(request.output_ids) == max_tokens
    assert harness.scheduler.stats.wasted_positions == 0


def test_decode_rows_do_not_wait_for_the_prefill_budget() -> None:
    harness = Harness(3, budget=1)
    harness.add(request_of(0, 2, 30))
    harness.step(0)
    harness.step(0)
    harness.add(request_of(1, 20, 4))
    for _ in range(8):  # the budget is one token, and yet the decode row is in every launch, whole
        plan = harness.step(0)
        assert plan is not None
        assert plan.decode is not None
        assert plan.prefill is not None
        assert (plan.decode.num_draft, plan.prefill.lengths.tolist()) == (3, [1])


def test_a_stream_of_long_prompts_and_running_decodes_both_move_on() -> None:
    """Fairness: in every launch the decode rows are whole and the prefill budget is used up."""
    harness = Harness(2, budget=8, num_pages=256, max_num_seqs=6)
    for i in range(30):
        harness.add(request_of(i, [3 + i] * 24, 12))
    running = 0
    while harness.scheduler.waiting:
        plan = harness.step(1)
        assert plan is not None
        decoding = 0 if plan.decode is None else len(plan.decode.slots)
        assert decoding >= min(running, 1)
        running = decoding
        if harness.scheduler.table.num_free:
            assert plan.prefill is not None
            assert plan.prefill.lengths.sum() == 8
    harness.run(1)


def test_pages_return_only_behind_the_fence() -> None:
    harness = Harness(3, acceptance=0.0)
    request = harness.add(request_of(0, 7, 10))
    for _ in range(3):
        harness.launch()
    pool = harness.scheduler.pool
    owned = pool.num_pages - pool.num_available
    harness.scheduler.abort(request)
    for _ in range(3):
        assert pool.num_fenced == owned
        harness.runner.answer()
    harness.assert_idle()
    assert request.output_ids == []


def test_a_request_that_ends_without_overrun_frees_its_pages_at_once() -> None:
    """Scenario 15: at depth 2, with every draft rejected, the last launch is the one that ends it."""
    harness = Harness(3, acceptance=0.0)
    request = harness.add(request_of(0, 7, 4))
    while request.finish_reason is None:
        harness.step(2)
    assert not harness.runner.in_flight
    assert harness.scheduler.pool.num_fenced == 0
    harness.assert_idle()


@pytest.mark.parametrize("progress", [0, 1, 2, 3])
def test_aborted_requests_keep_exactly_the_tokens_answered_before(progress: int) -> None:
    """Aborts with two answers pending, in order of submission (scenario 2)."""
    harness = Harness(2, acceptance=1.0, max_num_seqs=4)
    requests = [harness.add(request_of(i, 5 + i, 40)) for i in range(4)]
    for _ in range(2 + progress):
        harness.launch()
    for _ in range(progress):
        harness.runner.answer()
    told = [len(r.output_ids) for r in requests]
    for request in requests:
        harness.scheduler.abort(request)
        harness.scheduler.check(harness.runner.plans)
    harness.run(depth=2)
    assert [len(r.output_ids) for r in requests] == told
    assert told == [0 if progress == 0 else 1 + 3 * (progress - 1)] * 4


def test_a_released_slot_ignores_answers_of_its_previous_owner() -> None:
    harness = Harness(3, acceptance=1.0, max_num_seqs=1)
    old = harness.add(request_of(0, 3, 20))
    for _ in range(3):
        harness.launch()
    harness.scheduler.abort(old)
    new = harness.add(request_of(1, 5, 20))
    assert [a.slot for a in harness.launch().admissions] == [0]  # reused while its old launches are in flight
    for _ in range(3):
        harness.runner.answer()
    assert harness.scheduler.stats.wasted_positions == 1 + 4 + 4  # first token of the prefill, two decode rows
    harness.run(depth=4)
    assert old.output_ids == []
    assert len(new.output_ids) == 20


def test_the_last_in_rank_yields_its_pages_and_loses_nothing() -> None:
    """Preemption with launches in flight, k 0 and 3, depth 4 (scenarios 3, 8)."""
    for k, priority in ((0, 0), (3, 0), (3, -1)):
        harness = Harness(k, num_pages=8, max_num_seqs=2)
        first, second = harness.add(request_of(0, 8, 20)), harness.add(request_of(1, [5] * 8, 20, priority=priority))
        harness.run(depth=4)
        lower, higher = (first, second) if priority < 0 else (second, first)
        assert higher.num_preemptions == 0
        assert lower.num_preemptions > 0
        for request in (first, second):
            check_end(request)


def test_identical_prompts_of_one_step_are_computed_once() -> None:
    """Scenario 5, in the same step and in a later one."""
    harness = Harness(1, page_size=4, budget=64)
    requests = [harness.add(request_of(i, [7] * 14, 6)) for i in range(3)]
    plan = harness.launch()
    assert plan.prefill is not None
    assert plan.prefill.lengths.tolist() == [14, 2, 2]
    assert (plan.prefill.page_table[:, :3] == plan.prefill.page_table[0, :3]).all()
    requests.append(harness.add(request_of(3, [7] * 14, 6)))
    later = harness.launch()
    assert later.prefill is not None
    assert later.prefill.lengths.tolist() == [2]
    assert harness.scheduler.stats.prefix_cache_hits == 36
    harness.run(depth=2)
    for request in requests:
        check_end(request)


def test_a_second_turn_reuses_prompt_and_accepted_output_but_no_rejected_draft() -> None:
    """Scenario 6: the fake device would find a page that holds rejected drafts."""
    for acceptance in (0.0, 0.5, 1.0):
        harness = Harness(5, acceptance=acceptance, seed=4)
        first = harness.add(request_of(0, 9, 14))
        harness.run(depth=2)
        harness = Harness(5, acceptance=acceptance, seed=4)
        first = harness.add(request_of(0, 9, 14))
        while first.finish_reason is None:
            harness.step(2)
        second = harness.add(request_of(1, [*first.token_ids, 9, 9], 5))
        harness.run(depth=2)
        assert (
            harness.scheduler.stats.prefix_cache_hits == 20
        )  # 23 tokens, the last without KV: five full pages of four
        check_end(second)


def test_a_full_prefix_hit_joins_decode_at_once_with_all_its_positions() -> None:
    """Scenarios 21 and 22: the one token that is left is the first position of a whole 1 + k row."""
    harness = Harness(3)
    harness.add(request_of(0, [6] * 9, 2))
    while harness.scheduler.has_requests():
        harness.step(0)
    harness.add(request_of(1, [6] * 9, 3))
    plan = harness.launch()
    assert plan.prefill is None
    assert plan.decode is not None
    assert (plan.decode.computed_bound.tolist(), plan.decode.num_draft) == ([8], 3)
    harness.run()


def test_a_different_salt_or_a_reset_shares_nothing() -> None:
    harness = Harness(1, budget=64)
    harness.add(request_of(0, [7] * 12, 30))
    harness.launch()
    salted = request_of(1, [7] * 12, 4)
    salted.cache_salt = "tenant"
    harness.add(salted)
    assert harness.launch().prefill.lengths.tolist() == [12]  # type: ignore[union-attr]
    harness.scheduler.reset_prefix_cache()  # with two launches in flight (scenario 9)
    harness.add(request_of(2, [7] * 12, 4))
    assert harness.launch().prefill.lengths.tolist() == [12]  # type: ignore[union-attr]
    harness.run(depth=2)
    assert harness.scheduler.stats.prefix_cache_hits == 0


def test_what_a_faulty_request_computed_is_never_shared() -> None:
    """Scenario 41: not even the prompt pages that were known before the fault showed."""
    harness = Harness(2, budget=64)
    sick = harness.add(request_of(0, [7] * 12, 30))
    harness.launch()
    plan, result = harness.runner.in_flight[0]
    assert result.prefill is not None
    unhealthy = dataclasses.replace(result.prefill, num_healthy=np.zeros(1, np.int64))
    harness.runner.in_flight[0] = (plan, StepResult(unhealthy, None))
    assert harness.scheduler.pool.num_known == 3
    harness.runner.answer()
    assert (sick.finish_reason, sick.output_ids) == ("error", [])
    assert harness.scheduler.pool.num_known == 0
    retry = harness.add(request_of(1, [7] * 12, 4))
    assert harness.launch().prefill.lengths.tolist() == [12]  # type: ignore[union-attr]
    harness.run()
    check_end(retry)


def test_abort_in_the_middle_of_a_chunked_prefill_leaks_nothing() -> None:
    """Scenario 16; what was launched stays usable."""
    harness = Harness(2, budget=5)
    request = harness.add(request_of(0, [7] * 20, 4))
    harness.launch()
    harness.launch()
    harness.scheduler.abort(request)
    again = harness.add(request_of(1, [7] * 20, 4))
    assert harness.launch().prefill.starts.tolist() == [8]  # type: ignore[union-attr]
    harness.run(depth=2)
    check_end(again)


def test_priority_comes_before_arrival() -> None:
    harness = Harness(0, max_num_seqs=1)
    requests = [harness.add(request_of(i, 4, 2, priority=p)) for i, p in enumerate([0, 5, -1, 0])]
    ended: list[str] = []
    while harness.scheduler.has_requests():
        harness.step(0)
        ended += [r.request_id for r in requests if r.finish_reason and r.request_id not in ended]
    assert ended == ["2", "0", "3", "1"]


def test_plan_arrays_are_snapshots() -> None:
    """What a launch knew does not change when the scheduler moves on (bug class E, 44)."""
    harness = Harness(3, num_pages=256, page_size=4)
    harness.add(request_of(0, 4, 60))
    harness.launch()
    plan = harness.launch()
    assert plan.decode is not None
    before: list[Any] = [
        array.copy() for array in (plan.decode.computed_bound, plan.decode.page_table, plan.decode.epochs)
    ]
    for _ in range(4):
        harness.launch()
    after: tuple[Any, ...] = (plan.decode.computed_bound, plan.decode.page_table, plan.decode.epochs)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    harness.run(depth=4)
