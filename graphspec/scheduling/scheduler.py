"""The scheduler. It runs ahead of the device: it plans step n + 1 before it knows what step n accepted. No torch.

The life of a request: `add` queues it, `next` admits it into a slot, computes its prompt in chunks and then gives it a
row of every decode launch, `commit` settles what launches emitted and frees the slot when the request ends. `abort` and
preemption free it earlier. Nothing here waits for the device, and nothing it decides depends on what a launch in flight
will accept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphspec.records.acceptance import AcceptanceLog, CollapseWatch
from graphspec.records.launch import Admission, IntArray, StepPlan, StepResult, placeholders_of_decode
from graphspec.records.request import Request
from graphspec.scheduling.draft_controller import DraftController
from graphspec.scheduling.draft_policy import AdaptiveK
from graphspec.scheduling.invariants import check, describe
from graphspec.scheduling.kv_cache_manager import KVCacheManager
from graphspec.scheduling.launch_rows import Chunk, admission_of, launch_decode, launch_prefill
from graphspec.scheduling.page_pool import PagePool, salt_word
from graphspec.scheduling.request_queue import RequestQueue
from graphspec.scheduling.result_processor import Emission, ResultProcessor
from graphspec.scheduling.slot_table import DECODE, FREE, PREFILL, SlotTable
from graphspec.scheduling.spec_stats import SpecStats


@dataclass(frozen=True)
class SchedulerConfig:
    """The limits the scheduler works with.

    tiers          every k a step may have, ascending
    pad            rows of the captured step that serves so many
    table_width    entries of a page-table row
    reads_prompt, drafts_ahead, lookahead   of the drafter, see `drafting.protocol`
    """

    max_num_seqs: int
    max_prefill_tokens: int
    tiers: tuple[int, ...]
    lookahead: int
    page_size: int
    num_pages: int
    table_width: int
    reads_prompt: bool = False
    drafts_ahead: bool = True
    pad: Callable[[int], int] = int  # no padding

    @property
    def max_draft(self) -> int:
        return self.tiers[-1]


class Scheduler:
    """Queues, slots and pages. `next` makes the plan of a launch, `commit` takes its answer."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = PagePool(config.num_pages)
        self.table = SlotTable(config.max_num_seqs, config.table_width, self.pool.scratch_page)
        self.waiting = RequestQueue()
        self.stats = SpecStats(config.max_draft)
        # Stays empty unless rejections are explained.
        self.acceptance = AcceptanceLog(config.max_draft, CollapseWatch())
        self._kv = KVCacheManager(self.pool, self.table, config.page_size, config.lookahead)
        self._drafts = DraftController(
            self.table,
            tiers=config.tiers,
            pad=config.pad,
            reads_prompt=config.reads_prompt,
            drafts_ahead=config.drafts_ahead,
        )
        self._results = ResultProcessor(self.table, self.stats, self.acceptance, config.max_draft)
        self._next_step = 0
        self._was_idle = True  # at some time since the last launch there was no request

    @property
    def policy(self) -> AdaptiveK:
        return self._drafts.policy

    @property
    def num_running(self) -> int:
        return self.config.max_num_seqs - self.table.num_free

    def has_requests(self) -> bool:
        return bool(self.waiting) or self.num_running > 0

    # Requests come and go.

    def add(self, request: Request) -> None:
        self._was_idle |= not self.has_requests()
        self.waiting.add(request)

    def abort(self, request: Request) -> None:
        """End `request` now. Answers still in flight for it will be dropped."""
        if request.slot is None:
            self.waiting.remove(request)
        else:
            self._free(request.slot)
        request.finish_reason = "abort"

    # One launch.

    def next(self) -> StepPlan | None:
        """The next launch, or None if nothing can be launched now.

        Decode rows come first and never wait for the prefill budget, which bounds the prompt tokens of a launch:
        running prefills first, then waiting requests, both in order of rank.
        """
        step, budget = self._next_step, self.config.max_prefill_tokens
        drafts = self._drafts.choose()
        decode_slots, short_of_pages = self._slots_to_decode(drafts.consumed)
        drafts, catch_up = self._drafts.catch_up(drafts, budget if len(decode_slots) else 0, step)
        if catch_up is not None:
            budget = 0  # a launch has these chunks or those of prompts
        chunks = self._continue_prompts(budget)
        budget -= sum(length for _, length in chunks)
        admissions = [] if short_of_pages else self._admit_waiting(budget, chunks)
        if admissions:
            at_once = [a.slot for a in admissions if self.table.phase[a.slot] == DECODE]
            decode_slots = np.append(decode_slots, np.array(at_once, np.int64))
        decode = launch_decode(self.table, decode_slots, drafts.consumed, step)
        prefill = launch_prefill(self.table, chunks, step)
        if decode is None and prefill is None:
            return None
        plan = StepPlan(step, tuple(admissions), prefill, decode, drafts.proposed, catch_up, self._was_idle)
        self._next_step, self._was_idle = step + 1, False
        self._drafts.launched(plan)
        return plan

    def _slots_to_decode(self, num_draft: int) -> tuple[IntArray, bool]:
        """Slots that decode in this launch, with their pages reserved, and whether any had to sit out for pages.

        A request whose launches in flight reach its limit even with every draft rejected is not launched again.
        """
        table = self.table
        slots = np.flatnonzero((table.phase == DECODE) & (table.settled + table.min_in_flight < table.limit))
        missing = self._kv.missing_pages(slots, placeholders_of_decode(num_draft))
        short = np.flatnonzero(missing > 0)
        # If the pages reach for all, nobody has to wait, so the order does not matter.
        if not len(short) or self._kv.reserve(slots[short], missing[short]):
            return slots, False
        may_run = np.ones(len(slots), np.bool_)
        for i in short[np.argsort(table.rank[slots[short]])].tolist():
            may_run[i] = table.phase[slots[i]] == DECODE and self._reserve_or_preempt(slots[i], missing[i])
        kept = slots[may_run & (table.phase[slots] == DECODE)]
        return kept, len(kept) < len(slots)

    def _reserve_or_preempt(self, slot: int, count: int) -> bool:
        """Reserve `count` pages for `slot`; preempt requests of higher rank for them if it must be.

        False: the slot sits this launch out, because its pages are still behind the fence or it was itself the last
        in rank and was preempted.
        """
        pool, table = self.pool, self.table
        while not self._kv.reserve(np.array([slot]), np.array([count])):
            if pool.num_available + pool.num_fenced >= count:
                return False
            running = np.flatnonzero(table.phase != FREE)
            last = int(running[np.argmax(table.rank[running])])
            self._preempt(last)
            if last == slot:
                return False
        return True

    def _continue_prompts(self, budget: int) -> list[Chunk]:
        """The next chunks of running requests whose prompt is not computed yet, of at most `budget` tokens."""
        table, chunks = self.table, list[Chunk]()
        prefilling = np.flatnonzero(table.phase == PREFILL)
        for slot in prefilling[np.argsort(table.rank[prefilling])].tolist():
            budget -= self._take_chunk(slot, budget, chunks)
        return chunks

    def _admit_waiting(self, budget: int, chunks: list[Chunk]) -> list[Admission]:
        """Admit waiting requests as long as something is left of `budget`, and add their first chunks to `chunks`."""
        admissions = []
        while budget and (admission := self._admit()) is not None:
            admissions.append(admission)
            budget -= self._take_chunk(admission.slot, budget, chunks)
        return admissions

    def _admit(self) -> Admission | None:
        """Give the first waiting request a slot, if there is one and the pages reach. No request overtakes it."""
        table, config = self.table, self.config
        if not self.waiting or not table.num_free:
            return None
        request = self.waiting.first()
        allocation = self._kv.allocate(request, placeholders_of_decode(config.max_draft))
        if allocation is None:
            return None
        self.waiting.remove(request)
        pages, num_cached = allocation
        slot = table.allocate(request, pages, num_cached, config.page_size, may_skip_prefill=not config.reads_prompt)
        self._drafts.admitted(slot)
        self.stats.prefix_cache_queries += request.num_tokens
        self.stats.prefix_cache_hits += num_cached * config.page_size
        return admission_of(request, slot, salt_word(self.pool.root(request.cache_salt)))

    def _take_chunk(self, slot: int, budget: int, chunks: list[Chunk]) -> int:
        """Give the prompt of `slot` as much of `budget` as it needs; returns what it took. What the chunk completes
        is known to the prefix cache from here on: launches run in order."""
        table = self.table
        length = min(budget, int(table.settled[slot] - table.prefilled[slot]))
        if table.phase[slot] != PREFILL or not length:
            return 0
        chunks.append((slot, length))
        table.prefilled[slot] += length
        self._kv.publish(slot, int(table.prefilled[slot]))
        return length

    # Its answer.

    def commit(self, plan: StepPlan, result: StepResult) -> list[Emission]:
        """Settle an answered launch. Rows of an older epoch are dropped and only counted."""
        self._drafts.answered(plan, result)
        emissions, ended = self._results.process(plan, result)
        for request in ended:
            assert request.slot is not None
            self._free(request.slot, faulty=request.finish_reason == "error")
        self.pool.answered(plan.step)
        return emissions

    # Slots change hands.

    def _free(self, slot: int, *, faulty: bool = False) -> None:
        """Give back the slot and its pages. What was computed stays in the prefix cache, unless it is `faulty`."""
        table = self.table
        if faulty:
            self._kv.withdraw(slot)
        else:
            # The newest token has no KV yet, and what the drafter has not read is worth nothing to it.
            computed = min(int(table.settled[slot]) - 1, self._drafts.num_computed(slot))
            if table.phase[slot] == PREFILL:
                computed = min(computed, int(table.prefilled[slot]))
            self._kv.publish(slot, computed)
        self._kv.release(slot)
        self._drafts.freed(slot)
        table.free(slot)

    def _preempt(self, slot: int) -> None:
        """Give up the slot and its pages; the request starts over from its settled tokens. Its keys redraw what was
        in flight, so nothing is lost and nothing is delivered twice."""
        request = self.table.request[slot]
        assert request is not None
        self._free(slot)
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.add(request)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Running requests go on; nothing they compute is shared any more."""
        self.pool.reset_cache()

    # What it knows.

    def describe(self) -> dict[str, Any]:
        """Queues, slots and pages in JSON types, for `Engine.dump_state`."""
        return describe(self.table, self.pool, self.waiting)

    def check(self, in_flight: list[StepPlan]) -> None:
        """Assert every invariant of queues, slots and pages, given the launches that are not answered yet."""
        check(self.table, self.pool, self.waiting, in_flight, self.config.page_size)
        self._drafts.check()
