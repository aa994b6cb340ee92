"""The scheduler. It runs ahead of the device: it plans step n + 1 before it knows what step n accepted. No torch.

    upper bound of a request = settled + placeholders in flight + placeholders of this launch
    pages it must own        = ceil(min(upper + drafter lookahead, limit) / page_size)

Both are written once, in `_pages_needed`. Nothing here waits for the device, and nothing it decides depends on what
a launch in flight will accept.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

import numpy as np

from graphspec.pages import PagePool
from graphspec.request import FinishReason, Request, sampler_kind
from graphspec.slots import DECODE, FREE, PREFILL, SlotTable
from graphspec.stats import SpecStats
from graphspec.step import (
    Admission,
    DecodeRows,
    IntArray,
    PrefillRows,
    RowResults,
    StepPlan,
    StepResult,
    placeholders_of_decode,
)


@dataclass(frozen=True)
class SchedulerConfig:
    """The limits the scheduler works with; `table_width` is the number of entries of a page-table row."""

    max_num_seqs: int
    max_prefill_tokens: int
    num_draft: int
    lookahead: int
    page_size: int
    num_pages: int
    table_width: int


@dataclass(frozen=True)
class Emission:
    """Tokens of one request that became known with an answer."""

    request: Request
    token_ids: list[int]
    finish_reason: FinishReason | None


class Scheduler:
    """Queues, slots and pages. `next` makes the plan of a launch, `commit` takes its answer."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = PagePool(config.num_pages)
        self.table = SlotTable(config.max_num_seqs, config.table_width, self.pool.scratch_page)
        self.waiting: list[Request] = []  # by arrival; everything running arrived earlier
        self.stats = SpecStats(config.num_draft)
        self._next_step = 0

    # Requests come and go.

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.page_size)

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=_arrival)

    def abort(self, request: Request) -> None:
        """End `request` now. Answers still in flight for it will be dropped."""
        if request.slot is None:
            self.waiting.remove(request)
        else:
            self._vacate(request.slot)
        request.finish_reason = "abort"

    @property
    def num_running(self) -> int:
        return self.config.max_num_seqs - self.table.num_unused

    def has_requests(self) -> bool:
        return bool(self.waiting) or self.num_running > 0

    # One launch.

    def next(self) -> StepPlan | None:
        """The next launch, or None if nothing can be launched now.

        Decode rows come first and never wait for the prefill budget.
        """
        step = self._next_step
        decode_slots, short_of_pages = self._decodable()
        admissions = () if short_of_pages else self._admit()
        fresh = np.array([a.slot for a in admissions if self.table.phase[a.slot] == DECODE], np.int64)
        decode = self._plan_decode(np.concatenate((decode_slots, fresh)), step)
        prefill = self._plan_prefill(step)
        if decode is None and prefill is None:
            assert not admissions
            return None
        self._next_step += 1
        return StepPlan(step, admissions, prefill, decode)

    def _pages_needed(self, slots: IntArray, placeholders: int) -> IntArray:
        """Pages the slots must own before a launch that adds `placeholders` to each."""
        table = self.table
        upper = table.settled[slots] + table.placeholders[slots] + placeholders
        reach = np.minimum(upper + self.config.lookahead, table.limit[slots])
        needed: IntArray = -(-reach // self.config.page_size)
        return needed

    def _decodable(self) -> tuple[IntArray, bool]:
        """Slots that decode in this launch, with their pages reserved, and whether any had to sit out for pages.

        A request whose launches in flight reach its limit even with every draft rejected is not launched again.
        """
        table = self.table
        slots = np.flatnonzero((table.phase == DECODE) & (table.settled + table.sampling < table.limit))
        missing = self._pages_needed(slots, placeholders_of_decode(self.config.num_draft)) - table.num_pages[slots]
        hungry = slots[missing > 0]
        if not len(hungry):
            return slots, False
        waits = set()
        for slot in hungry[np.argsort(table.arrival[hungry])].tolist():
            count = int(missing[np.searchsorted(slots, slot)])
            if table.phase[slot] == DECODE and not self._feed(slot, count):
                waits.add(slot)
        served = [s for s in slots.tolist() if table.phase[s] == DECODE and s not in waits]
        return np.array(served, np.int64), len(served) < len(slots)

    def _feed(self, slot: int, count: int) -> bool:
        """Reserve `count` pages for `slot`; preempt younger requests for them if it must be.

        False: the slot sits this launch out, because its pages are still behind the fence or it was itself the
        youngest and was preempted.
        """
        pool, table = self.pool, self.table
        while pool.num_free < count:
            if pool.num_free + pool.num_fenced >= count:
                return False
            running = np.flatnonzero(table.phase != FREE)
            victim = int(running[np.argmax(table.arrival[running])])
            self._preempt(victim)
            if victim == slot:
                return False
        table.append_pages(slot, pool.reserve(count))
        return True

    def _admit(self) -> tuple[Admission, ...]:
        """Move waiting requests into free slots, first come first served, as long as the pages reach."""
        admitted = []
        table, pool = self.table, self.pool
        while self.waiting and table.num_unused:
            request = self.waiting[0]
            reach = request.num_tokens + placeholders_of_decode(self.config.num_draft) + self.config.lookahead
            count = self.pages_for(min(reach, request.limit))
            if pool.num_free < count:
                break
            self.waiting.pop(0)
            slot = table.occupy(request)
            table.append_pages(slot, pool.reserve(count))
            if request.num_tokens == 1:  # nothing to prefill: the only token is the first one a decode step computes
                table.phase[slot] = DECODE
            token_ids = np.array(request.prompt_ids + request.output_ids, np.int32)
            admitted.append(Admission(slot, token_ids, request.params, request.seed))
        return tuple(admitted)

    def _plan_decode(self, slots: IntArray, step: int) -> DecodeRows | None:
        if not len(slots):
            return None
        table, num_draft = self.table, self.config.num_draft
        rows = DecodeRows(
            slots=slots,
            epochs=table.epoch[slots],
            computed_bound=table.settled[slots] - 1 + table.placeholders[slots],
            page_table=table.page_table[slots],
            num_draft=num_draft,
            sampler=sampler_kind(int(np.bitwise_or.reduce(table.needs[slots]))),
        )
        table.placeholders[slots] += placeholders_of_decode(num_draft)
        table.sampling[slots] += 1
        table.last_step[slots] = step
        return rows

    def _plan_prefill(self, step: int) -> PrefillRows | None:
        """Chunks of prompts, oldest request first, within the token budget of a launch."""
        table, budget = self.table, self.config.max_prefill_tokens
        slots, lengths = [], []
        in_prefill = np.flatnonzero(table.phase == PREFILL)
        for slot in in_prefill[np.argsort(table.arrival[in_prefill])].tolist():
            if budget == 0:
                break
            length = min(budget, int(table.settled[slot] - table.prefilled[slot]))
            budget -= length
            slots.append(slot)
            lengths.append(length)
        if not slots:
            return None
        index, count = np.array(slots, np.int64), np.array(lengths, np.int64)
        starts = table.prefilled[index]
        table.prefilled[index] += count
        table.last_step[index] = step
        final = table.prefilled[index] == table.settled[index]
        sampler = sampler_kind(int(np.bitwise_or.reduce(table.needs[index])))
        rows = PrefillRows(index, table.epoch[index], starts, count, final, table.page_table[index], sampler)
        done = index[final]
        table.phase[done] = DECODE
        table.placeholders[done] += 1
        table.sampling[done] += 1
        return rows

    # Its answer.

    def commit(self, plan: StepPlan, result: StepResult) -> list[Emission]:
        """Settle an answered launch. Rows of an older epoch are dropped and only counted."""
        emissions: list[Emission] = []
        if plan.prefill is not None and result.prefill is not None:
            final = plan.prefill.final
            rows = RowResults(*(array[final] for array in vars(result.prefill).values()))
            emissions += self._settle(plan.prefill.slots[final], plan.prefill.epochs[final], rows, 1, drafted=False)
        if plan.decode is not None and result.decode is not None:
            width = placeholders_of_decode(plan.decode.num_draft)
            emissions += self._settle(plan.decode.slots, plan.decode.epochs, result.decode, width, drafted=True)
        self.pool.answered(plan.step)
        return emissions

    def _settle(
        self, slots: IntArray, epochs: IntArray, rows: RowResults, placeholders: int, drafted: bool
    ) -> list[Emission]:
        table = self.table
        alive = table.epoch[slots] == epochs
        self.stats.wasted_positions += placeholders * int(np.count_nonzero(~alive))
        slots, tokens, emitted = slots[alive], rows.tokens[alive], rows.num_emitted[alive]
        if not len(slots):
            return []
        table.placeholders[slots] -= placeholders
        table.sampling[slots] -= 1

        # Finish rules hold per emitted token: cut after the first stop id, and at the limit.
        assert (rows.computed[alive] == table.settled[slots] - 1).all(), "the device and the host disagree about a slot"
        room = table.limit[slots] - table.settled[slots]
        columns = np.arange(tokens.shape[1])
        is_stop = (tokens[:, :, None] == table.stop_ids[slots][:, None, :]).any(-1) & (columns < emitted[:, None])
        first_stop = np.where(is_stop.any(-1), is_stop.argmax(-1), tokens.shape[1])
        kept = np.minimum(np.minimum(emitted, room), first_stop + 1)
        healthy = rows.num_healthy[alive]
        failed = healthy < kept
        kept = np.minimum(kept, healthy)
        stopped, full = first_stop < kept, kept == room
        table.settled[slots] += kept
        if drafted:
            self.stats.record(emitted - 1, np.minimum(kept, emitted - 1))
        self.stats.num_output_tokens += int(kept.sum())

        emissions = []
        over = (stopped | full | failed).tolist()
        for i, (slot, row, count) in enumerate(zip(slots.tolist(), tokens.tolist(), kept.tolist(), strict=True)):
            request = table.request[slot]
            assert request is not None
            new = row[:count]
            request.output_ids += new
            if over[i]:
                request.finish_reason = "error" if failed[i] else "stop" if stopped[i] else "length"
                self._vacate(slot)
            emissions.append(Emission(request, new, request.finish_reason))
        return emissions

    # Slots change hands.

    def _vacate(self, slot: int) -> None:
        last_step = int(self.table.last_step[slot])
        self.pool.release(self.table.vacate(slot), last_step)

    def _preempt(self, slot: int) -> None:
        """Give up the slot and its pages; the request starts over from its settled tokens. Its keys redraw what was
        in flight, so nothing is lost and nothing is delivered twice."""
        request = self.table.request[slot]
        assert request is not None
        self._vacate(slot)
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        insort(self.waiting, request, key=_arrival)

    def check(self, in_flight: list[StepPlan]) -> None:
        """Assert every invariant of queues, slots and pages, given the launches that are not answered yet."""
        table = self.table
        self.pool.check(page for s in range(table.num_slots) for page in table.page_table[s, : table.num_pages[s]])
        placeholders, sampling = np.zeros_like(table.placeholders), np.zeros_like(table.sampling)
        for plan in in_flight:
            if (p := plan.prefill) is not None:
                current = p.slots[p.final & (table.epoch[p.slots] == p.epochs)]
                placeholders[current] += 1
                sampling[current] += 1
            if (d := plan.decode) is not None:
                current = d.slots[table.epoch[d.slots] == d.epochs]
                placeholders[current] += placeholders_of_decode(d.num_draft)
                sampling[current] += 1
        assert (placeholders == table.placeholders).all(), "placeholders are not the sum over launches in flight"
        assert (sampling == table.sampling).all(), "sampling launches are not the sum over launches in flight"
        running = np.flatnonzero(table.phase != FREE)
        assert (table.settled[running] < table.limit[running]).all(), "a request runs past its limit"
        for slot in running.tolist():
            request = table.request[slot]
            assert request is not None
            assert request.slot == slot
            assert table.settled[slot] == request.num_tokens, "settled differs from what was delivered"
            owned, reach = int(table.num_pages[slot]), int(table.settled[slot])
            assert owned * self.config.page_size >= reach, "a request owns fewer pages than it has settled tokens"
            assert (table.page_table[slot, owned:] == table.scratch_page).all()
        assert all(a.arrival < b.arrival for a, b in zip(self.waiting, self.waiting[1:], strict=False))


def _arrival(request: Request) -> int:
    return request.arrival
