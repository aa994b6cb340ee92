"""The scheduler. It runs ahead of the device: it plans step n + 1 before it knows what step n accepted. No torch.

    upper bound of a request = settled + placeholders in flight + placeholders of this launch
    pages it must own        = ceil(min(upper + drafter lookahead, limit) / page_size)

Both are written once, in `_pages_needed`. Nothing here waits for the device, and nothing it decides depends on what
a launch in flight will accept.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, cast

import numpy as np

from graphspec.records.acceptance import AcceptanceLog, CollapseWatch, VerifiedRows
from graphspec.records.launch import (
    Admission,
    DecodeRows,
    IntArray,
    LogprobRows,
    PrefillRows,
    RowResults,
    StepPlan,
    StepResult,
    placeholders_of_decode,
)
from graphspec.records.outputs import FinishReason, TokenLogprobs
from graphspec.records.request import Request
from graphspec.records.sampling_params import sampler_kind
from graphspec.scheduling.draft_catch_up import catch_up_chunks, fall_behind, learn_unread
from graphspec.scheduling.draft_policy import AdaptiveK, step_towards
from graphspec.scheduling.invariants import check, describe
from graphspec.scheduling.page_pool import PageHash, PagePool, page_hashes, salt_word
from graphspec.scheduling.slot_table import DECODE, FREE, PREFILL, SlotTable
from graphspec.scheduling.spec_stats import SpecStats


@dataclass(frozen=True)
class SchedulerConfig:
    """The limits the scheduler works with.

    tiers          every k a step may have, ascending
    pad            rows of the captured step that serves so many
    table_width    entries of a page-table row
    reads_prompt, drafts_ahead   of the drafter, see `drafting.protocol`
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


class Emission(NamedTuple):  # a third of the time of a frozen dataclass, and one is made per row and step
    """Tokens of one request that became known with an answer."""

    request: Request
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs] | None = None


# `Emission` of a tuple of its fields. The constructor of a NamedTuple is Python, which this goes around.
_emission = cast(Callable[[tuple[Any, ...]], Emission], partial(tuple.__new__, Emission))


class Decoded(NamedTuple):
    """What an answered decode step was."""

    num_draft: int
    off_graph: bool  # it replayed no graph


def _with_logprobs(emission: Emission, logprobs: LogprobRows, row: int) -> Emission:
    """`emission` with the log-probabilities of its tokens, if its request asked for them."""
    request = emission.request
    if request.params.logprobs is None:
        return emission
    entries = logprobs.take(row).entries(emission.token_ids, request.params.logprobs)
    request.logprobs += entries
    return emission._replace(logprobs=entries)


class Scheduler:
    """Queues, slots and pages. `next` makes the plan of a launch, `commit` takes its answer."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = PagePool(config.num_pages)
        self.table = SlotTable(config.max_num_seqs, config.table_width, self.pool.scratch_page)
        self.waiting: list[Request] = []  # by rank
        self.stats = SpecStats(config.max_draft)
        # Stays empty unless acceptance is explained.
        self.acceptance = AcceptanceLog(config.max_draft, CollapseWatch())
        self.policy = AdaptiveK(config.tiers, config.max_num_seqs, config.pad)
        self._next_step = 0
        self._rested = True  # since the last launch there was a time without a request
        self._proposed = config.max_draft if config.drafts_ahead else config.tiers[0]  # by the launch before

    # Requests come and go.

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.page_size)

    def add(self, request: Request) -> None:
        self._rested |= not self.has_requests()
        insort(self.waiting, request, key=_rank)

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

        Decode rows come first and never wait for the prefill budget, which bounds the prompt tokens of a launch:
        running prefills first, then waiting requests, both in order of rank.
        """
        step, table = self._next_step, self.table
        num_draft, num_draft_next = self._choose_k()
        decode_slots, short_of_pages = self._decodable(num_draft)
        chunks: list[tuple[int, int]] = []  # (slot, length)
        admissions: list[Admission] = []
        budget = self.config.max_prefill_tokens
        catch_up = None
        if num_draft_next and not num_draft and self.config.reads_prompt:
            catch_up, all_read = catch_up_chunks(table, budget if len(decode_slots) else 0, step)
            budget = budget if catch_up is None else 0  # a launch has these chunks or those of prompts
            num_draft_next = num_draft_next if all_read else 0
        prefilling = np.flatnonzero(table.phase == PREFILL)
        for slot in prefilling[np.argsort(table.rank[prefilling])].tolist():
            budget -= self._take_chunk(slot, budget, chunks)
        while budget and not short_of_pages and (admission := self._admit()) is not None:
            admissions.append(admission)
            budget -= self._take_chunk(admission.slot, budget, chunks)
        straight = [a.slot for a in admissions if table.phase[a.slot] == DECODE]
        decode = self._plan_decode(np.append(decode_slots, straight).astype(np.int64), step, num_draft)
        prefill = self._plan_prefill(chunks, step)
        if decode is None and prefill is None:
            return None
        self._next_step += 1
        if not num_draft_next and self.config.reads_prompt:
            if decode is not None:
                fall_behind(table, decode.slots)
            if prefill is not None:
                fall_behind(table, prefill.final_slots)
        if decode is not None:
            self.policy.launched(num_draft)
        self._proposed = num_draft_next
        rested, self._rested = self._rested, False
        return StepPlan(step, tuple(admissions), prefill, decode, num_draft_next, catch_up, rested)

    # How many drafts.

    def _choose_k(self) -> tuple[int, int]:
        """Drafts that the launch consumes and that it proposes. A drafter that drafts ahead always proposes the most;
        otherwise the choice is about the next launch, and goes to a neighbouring tier, for which there is a graph."""
        table, config = self.table, self.config
        if not self.policy.chooses:
            return config.max_draft, config.max_draft
        running = table.phase == DECODE
        wanted = self.policy.choose(int(running.sum()), np.flatnonzero(running & table.speculates))
        if config.drafts_ahead:
            return wanted, config.max_draft
        return self._proposed, step_towards(config.tiers, self._proposed, wanted)

    def _pages_needed(self, slots: IntArray, placeholders: int) -> IntArray:
        """Pages the slots must own before a launch that adds `placeholders` to each."""
        table = self.table
        upper = table.settled[slots] + table.placeholders[slots] + placeholders
        reach = np.minimum(upper + self.config.lookahead, table.limit[slots])
        needed: IntArray = -(-reach // self.config.page_size)
        return needed

    def _decodable(self, num_draft: int) -> tuple[IntArray, bool]:
        """Slots that decode in this launch, with their pages reserved, and whether any had to sit out for pages.

        A request whose launches in flight reach its limit even with every draft rejected is not launched again.
        """
        table = self.table
        slots = np.flatnonzero((table.phase == DECODE) & (table.settled + table.sampling < table.limit))
        missing = self._pages_needed(slots, placeholders_of_decode(num_draft)) - table.num_pages[slots]
        hungry = np.flatnonzero(missing > 0)
        if not len(hungry):
            return slots, False
        wanted = int(missing[hungry].sum())
        if wanted <= self.pool.num_available:  # nobody has to wait, so the order does not matter
            table.share_out(self.pool.reserve(wanted), slots[hungry], missing[hungry])
            return slots, False
        fed = np.ones(len(slots), np.bool_)
        for i in hungry[np.argsort(table.rank[slots[hungry]])].tolist():
            fed[i] = table.phase[slots[i]] == DECODE and self._feed(int(slots[i]), int(missing[i]))
        served = slots[fed & (table.phase[slots] == DECODE)]
        return served, len(served) < len(slots)

    def _feed(self, slot: int, count: int) -> bool:
        """Reserve `count` pages for `slot`; preempt requests of higher rank for them if it must be.

        False: the slot sits this launch out, because its pages are still behind the fence or it was itself the last
        in rank and was preempted.
        """
        pool, table = self.pool, self.table
        while pool.num_available < count:
            if pool.num_available + pool.num_fenced >= count:
                return False
            running = np.flatnonzero(table.phase != FREE)
            victim = int(running[np.argmax(table.rank[running])])
            self._preempt(victim)
            if victim == slot:
                return False
        table.append_pages(slot, pool.reserve(count))
        return True

    def _admit(self) -> Admission | None:
        """Give the first waiting request a slot, if there is one and the pages reach. No request overtakes it."""
        table, pool = self.table, self.pool
        if not self.waiting or not table.num_unused:
            return None
        request = self.waiting[0]
        reach = request.num_tokens + placeholders_of_decode(self.config.max_draft) + self.config.lookahead
        known = 0 if request.wants_prompt_logprobs else request.num_tokens - 1  # the last token is always computed
        shared = pool.find(self._hashes(request, known))
        count = self.pages_for(min(reach, request.limit)) - len(shared)
        if pool.num_available - pool.num_idle(shared) < count:
            return None
        del self.waiting[0]
        pool.share(shared)
        slot = table.occupy(
            request,
            shared + pool.reserve(count),
            len(shared),
            self.config.page_size,
            may_skip=not self.config.reads_prompt,
        )
        self.policy.acceptance.begin(slot)
        self.stats.prefix_cache_queries += request.num_tokens
        self.stats.prefix_cache_hits += len(shared) * self.config.page_size
        return Admission(
            slot=slot,
            token_ids=np.array(request.token_ids, np.int32),
            num_prompt=len(request.prompt_ids),
            params=request.params,
            rules=request.rules,
            seed=request.seed,
            index=request.index,
            salt=salt_word(pool.root(request.cache_salt)),
        )

    def _plan_decode(self, slots: IntArray, step: int, num_draft: int) -> DecodeRows | None:
        if not len(slots):
            return None
        table = self.table
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

    def _take_chunk(self, slot: int, budget: int, chunks: list[tuple[int, int]]) -> int:
        """Give the prompt of `slot` as much of `budget` as it needs; returns what it took. What the chunk completes
        is known to the prefix cache from here on: launches run in order."""
        table = self.table
        length = min(budget, int(table.settled[slot] - table.prefilled[slot]))
        if table.phase[slot] != PREFILL or not length:
            return 0
        chunks.append((slot, length))
        table.prefilled[slot] += length
        self._publish(slot, int(table.prefilled[slot]))
        return length

    def _plan_prefill(self, chunks: list[tuple[int, int]], step: int) -> PrefillRows | None:
        if not chunks:
            return None
        table = self.table
        slots, lengths = np.array(chunks, np.int64).T
        table.last_step[slots] = step
        final = table.prefilled[slots] == table.settled[slots]
        rows = PrefillRows(
            slots=slots,
            epochs=table.epoch[slots],
            starts=table.prefilled[slots] - lengths,
            lengths=lengths,
            final=final,
            scored_to=table.scored_to[slots],
            page_table=table.page_table[slots],
            sampler=sampler_kind(int(np.bitwise_or.reduce(table.needs[slots]))),
        )
        done = slots[final]
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
            rows = result.prefill.take(final)
            if result.prompt_logprobs is not None:
                self._score_prompts(plan.prefill, result.prompt_logprobs)
            emissions += self._settle(plan, plan.prefill.slots[final], plan.prefill.epochs[final], rows)
        if plan.decode is not None and result.decode is not None:
            self._learn(plan.decode, result.decode, result.seconds)
            decoded = Decoded(plan.decode.num_draft, bool(result.off_graph))
            emissions += self._settle(plan, plan.decode.slots, plan.decode.epochs, result.decode, decoded)
        self.pool.answered(plan.step)
        return emissions

    def _learn(self, decode: DecodeRows, rows: RowResults, seconds: float | None) -> None:
        """What an answer says about costs and acceptance, if there is a k to choose by it."""
        if not self.policy.chooses:
            return
        table = self.table
        alive = table.epoch[decode.slots] == decode.epochs
        slots, rows = decode.slots[alive], rows.take(alive)
        visible = min(decode.num_draft + self.config.drafts_ahead, self.config.max_draft)
        speculate = table.speculates[slots]
        matching = slots[speculate], rows.num_matching_drafts[speculate]
        self.policy.answered(len(decode.slots), decode.num_draft, seconds, *matching, visible)

    def _score_prompts(self, chunks: PrefillRows, logprobs: LogprobRows) -> None:
        """Hand the log-probabilities of prompt tokens to the requests that asked for them. Chunks of one request are
        answered in order; after a preemption they start over."""
        ends = chunks.num_scored.cumsum()
        for i in np.flatnonzero(chunks.num_scored).tolist():
            slot, start, count = int(chunks.slots[i]), int(chunks.starts[i]), int(chunks.num_scored[i])
            request = self.table.request[slot]
            if self.table.epoch[slot] != chunks.epochs[i] or request is None:
                continue
            tokens, first = request.prompt_ids[start + 1 : start + 1 + count], int(ends[i]) - count
            own = logprobs.take(slice(first, first + count)).entries(tokens, request.params.prompt_logprobs or 0)
            request.prompt_logprobs[start + 1 :] = own

    def _settle(
        self, plan: StepPlan, slots: IntArray, epochs: IntArray, rows: RowResults, decoded: Decoded | None = None
    ) -> list[Emission]:
        """`decoded` is about the decode step the rows were in; None: they are those of a prefill."""
        table = self.table
        placeholders = 1 if decoded is None else placeholders_of_decode(decoded.num_draft)
        alive = table.epoch[slots] == epochs
        self.stats.wasted_positions += placeholders * int(np.count_nonzero(~alive))
        if not alive.all():
            slots, rows = slots[alive], rows.take(alive)
        tokens, emitted = rows.tokens, rows.num_emitted
        if not len(slots):
            return []
        table.placeholders[slots] -= placeholders
        table.sampling[slots] -= 1
        if self.config.reads_prompt and not plan.num_draft_next:
            learn_unread(table, slots, rows.computed)

        # Finish rules hold per emitted token: cut after the first stop id, and at the limit.
        assert (rows.computed == table.settled[slots] - 1).all(), "the device and the host disagree about a slot"
        room = table.limit[slots] - table.settled[slots]
        columns = np.arange(tokens.shape[1])
        is_stop = (tokens[:, :, None] == table.stop_ids[slots][:, None, :]).any(-1) & (columns < emitted[:, None])
        first_stop = np.full(len(slots), tokens.shape[1])
        if is_stop.any():  # in few steps
            is_stop &= table.settled[slots][:, None] + columns + 1 >= table.min_length[slots][:, None]
            first_stop = np.where(is_stop.any(-1), is_stop.argmax(-1), tokens.shape[1])
        kept = np.minimum(np.minimum(emitted, room), first_stop + 1)
        failed = rows.num_healthy < kept
        kept = np.minimum(kept, rows.num_healthy)
        for i in np.flatnonzero(table.watched[slots]).tolist():
            kept[i], first_stop[i] = self._cut_at_stop_string(slots[i], tokens[i, : kept[i]].tolist(), first_stop[i])
        stopped, full = first_stop < kept, kept == room
        failed &= ~stopped  # what is wrong behind a stop is no part of the output
        table.settled[slots] += kept
        if decoded is not None:
            table.decode_steps[slots] += 1
            table.off_graph_steps[slots] += decoded.off_graph
            counted = table.speculates[slots]
            accepted, delivered = (emitted - 1)[counted], np.minimum(kept, emitted - 1)[counted]
            self.stats.record(decoded.num_draft, accepted, delivered)
            if rows.rejections is not None and decoded.num_draft:
                why, context = rows.rejections.take(counted), rows.computed[counted]
                verified = VerifiedRows(why, accepted, delivered, room[counted], context)
                self._explain(slots[counted], verified, decoded.num_draft)
        self.stats.num_output_tokens += int(kept.sum())

        # Short loops over rows, the only ones.
        requests = [table.request[slot] for slot in slots.tolist()]
        pieces = [row[:count] for row, count in zip(tokens.tolist(), kept.tolist(), strict=True)]
        emissions = list(map(_emission, zip(requests, pieces, repeat(None), repeat(None))))
        for emission in emissions:
            emission.request.output_ids += emission.token_ids
        if rows.logprobs is not None:
            emissions = [_with_logprobs(emission, rows.logprobs, i) for i, emission in enumerate(emissions)]
        for i in np.flatnonzero(stopped | full | failed).tolist():
            reason: FinishReason = "error" if failed[i] else "stop" if stopped[i] else "length"
            emissions[i].request.finish_reason = reason
            self._vacate(int(slots[i]), faulty=bool(failed[i]))
            emissions[i] = emissions[i]._replace(finish_reason=reason)
        return emissions

    def _explain(self, slots: IntArray, rows: VerifiedRows, num_draft: int) -> None:
        """Count the causes of rejections, of all rows and for the request of each."""
        self.acceptance.record(rows, num_draft)
        for i, slot in enumerate(slots.tolist()):
            request = self.table.request[slot]
            assert request is not None
            if request.acceptance is None:
                request.acceptance = AcceptanceLog(self.config.max_draft)
            request.acceptance.record(rows.take(slice(i, i + 1)), num_draft)

    def _cut_at_stop_string(self, slot: int, new: list[int], first_stop: int) -> tuple[int, int]:
        """Tokens to keep of `new`, and the index of the one that stops: where a string ends, else `first_stop`."""
        request = self.table.request[slot]
        assert request is not None
        assert request.text is not None
        skip = max(0, request.params.min_tokens - len(request.output_ids) - 1)
        kept = request.text.accept(new, skip)
        return kept, kept - 1 if request.text.stopped else first_stop

    # Slots change hands.

    def _vacate(self, slot: int, *, faulty: bool = False) -> None:
        """Release slot and pages. What was computed stays in the prefix cache, unless it is `faulty`."""
        table = self.table
        pages = table.pages(slot)
        if faulty:
            self.pool.withdraw(pages[table.cached[slot] :])
        else:
            # The newest token has no KV yet, and what the drafter has not read is worth nothing to it.
            certain = min(int(table.settled[slot]) - 1, int(table.unread[slot]))
            self._publish(slot, min(certain, int(table.prefilled[slot])) if table.phase[slot] == PREFILL else certain)
        self.pool.release(pages, int(table.last_step[slot]))
        table.vacate(slot)

    def _publish(self, slot: int, num_tokens: int) -> None:
        """Let the prefix cache know the full pages of the first `num_tokens` tokens, which are certain."""
        table, request = self.table, self.table.request[slot]
        assert request is not None
        full, start = num_tokens // self.config.page_size, int(table.published[slot])
        if full > start and request.hash_root == self.pool.root(request.cache_salt):
            self.pool.publish(table.pages(slot), self._hashes(request, num_tokens), start)
            table.published[slot] = full

    def _hashes(self, request: Request, num_tokens: int) -> list[PageHash]:
        """The hash chain over the full pages of the first `num_tokens` tokens of a request, kept with it."""
        size, root = self.config.page_size, self.pool.root(request.cache_salt)
        if request.slot is None and request.hash_root != root:
            request.hash_root, request.page_hashes = root, []
        known, full = len(request.page_hashes), num_tokens // size
        if known < full:
            parent = request.page_hashes[-1] if known else request.hash_root
            request.page_hashes += page_hashes(parent, request.token_ids[known * size : full * size], size)
        return request.page_hashes[:full]

    def _preempt(self, slot: int) -> None:
        """Give up the slot and its pages; the request starts over from its settled tokens. Its keys redraw what was
        in flight, so nothing is lost and nothing is delivered twice."""
        request = self.table.request[slot]
        assert request is not None
        self._vacate(slot)
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        insort(self.waiting, request, key=_rank)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Running requests go on; nothing they compute is shared any more."""
        self.pool.reset_cache()

    def describe(self) -> dict[str, Any]:
        """Queues, slots and pages in JSON types, for `Engine.dump_state`."""
        return describe(self.table, self.pool, self.waiting)

    def check(self, in_flight: list[StepPlan]) -> None:
        """Assert every invariant of queues, slots and pages, given the launches that are not answered yet."""
        check(self.table, self.pool, self.waiting, in_flight, self.config.page_size)


def _rank(request: Request) -> int:
    return request.rank
