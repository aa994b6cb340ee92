"""From the answer to a launch to tokens of requests: what is stale is dropped, what is known is settled, the finish
rules are applied, and everything is counted. No torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, cast

import numpy as np

from graphspec.records.acceptance import AcceptanceLog, VerifiedRows
from graphspec.records.launch import (
    BoolArray,
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
from graphspec.scheduling.slot_table import SlotTable
from graphspec.scheduling.spec_stats import SpecStats


class Emission(NamedTuple):  # a third of the time of a frozen dataclass, and one is made per row and step
    """Tokens of one request that became known with an answer."""

    request: Request
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs] | None = None


# `Emission` of a tuple of its fields. The constructor of a NamedTuple is Python, which this goes around.
_emission = cast(Callable[[tuple[Any, ...]], Emission], partial(tuple.__new__, Emission))


class Settled(NamedTuple):
    """What an answer made known, and the requests that ended with it, which still have their slots."""

    emissions: list[Emission]
    ended: list[Request]


class _DecodeStep(NamedTuple):
    """What an answered decode step was."""

    num_draft: int
    off_graph: bool  # it replayed no graph


class _Ends(NamedTuple):
    """Where the finish rules cut each of N rows, and why a request ends there."""

    kept: IntArray  # [N] tokens that are delivered
    stopped: BoolArray  # [N]
    at_limit: BoolArray  # [N]
    failed: BoolArray  # [N]


class ResultProcessor:
    """Settles answers in `table`. Counts in `stats`, and in `acceptance` where rejections are explained."""

    def __init__(self, table: SlotTable, stats: SpecStats, acceptance: AcceptanceLog, max_draft: int) -> None:
        self._table, self._stats, self._acceptance, self._max_draft = table, stats, acceptance, max_draft

    def process(self, plan: StepPlan, result: StepResult) -> Settled:
        """Take the answers in the order of their launches. Rows of an older epoch are dropped and only counted."""
        first = newer = Settled([], [])
        if plan.prefill is not None and result.prefill is not None:
            if result.prompt_logprobs is not None:
                self._add_prompt_logprobs(plan.prefill, result.prompt_logprobs)
            final = plan.prefill.final
            first = self._settle(plan.prefill.slots[final], plan.prefill.epochs[final], result.prefill.take(final))
        if plan.decode is not None and result.decode is not None:
            step = _DecodeStep(plan.decode.num_draft, bool(result.off_graph))
            newer = self._settle(plan.decode.slots, plan.decode.epochs, result.decode, step)
        return Settled(first.emissions + newer.emissions, first.ended + newer.ended)

    def _settle(self, slots: IntArray, epochs: IntArray, rows: RowResults, step: _DecodeStep | None = None) -> Settled:
        """`step` is the decode step the rows were in; None: they are those of a prefill."""
        table, stats = self._table, self._stats
        placeholders = 1 if step is None else placeholders_of_decode(step.num_draft)
        current = table.epoch[slots] == epochs
        if not current.all():
            stats.wasted_positions += placeholders * int(np.count_nonzero(~current))
            slots, rows = slots[current], rows.take(current)
        if not len(slots):
            return Settled([], [])
        table.remove_in_flight(slots, placeholders)
        assert (rows.computed == table.settled[slots] - 1).all(), "the device and the host disagree about a slot"
        room = table.limit[slots] - table.settled[slots]
        ends = self._apply_finish_rules(slots, rows, room)
        table.settled[slots] += ends.kept
        stats.num_output_tokens += int(ends.kept.sum())
        if step is not None:
            self._count(slots, rows, ends.kept, room, step)
        return self._emit(slots, rows, ends)

    def _apply_finish_rules(self, slots: IntArray, rows: RowResults, room: IntArray) -> _Ends:
        """They hold per emitted token: a row is cut behind the first one that stops the request, at its limit, and
        before the first one that is not healthy."""
        table, tokens, emitted = self._table, rows.tokens, rows.num_emitted
        columns = np.arange(tokens.shape[1])
        is_stop = (tokens[:, :, None] == table.stop_ids[slots][:, None, :]).any(-1) & (columns < emitted[:, None])
        first_stop = np.full(len(slots), tokens.shape[1])
        if is_stop.any():  # in few steps
            is_stop &= table.settled[slots][:, None] + columns + 1 >= table.min_length[slots][:, None]
            first_stop = np.where(is_stop.any(-1), is_stop.argmax(-1), tokens.shape[1])
        kept = np.minimum(np.minimum(emitted, room), first_stop + 1)
        failed = rows.num_healthy < kept
        kept = np.minimum(kept, rows.num_healthy)
        for i in np.flatnonzero(table.has_stop_strings[slots]).tolist():
            kept[i], first_stop[i] = self._cut_at_stop_string(slots[i], tokens[i, : kept[i]].tolist(), first_stop[i])
        stopped = first_stop < kept
        # What is wrong behind a stop is no part of the output.
        return _Ends(kept, stopped, at_limit=kept == room, failed=failed & ~stopped)

    def _cut_at_stop_string(self, slot: int, new: list[int], first_stop: int) -> tuple[int, int]:
        """Tokens to keep of `new`, and the index of the one that stops: where a string ends, else `first_stop`."""
        request = self._table.request[slot]
        assert request is not None
        assert request.detokenizer is not None
        skip = max(0, request.params.min_tokens - len(request.output_ids) - 1)
        kept = request.detokenizer.update(new, skip)
        return kept, kept - 1 if request.detokenizer.stopped else first_stop

    def _emit(self, slots: IntArray, rows: RowResults, ends: _Ends) -> Settled:
        """Deliver the tokens that are kept, in short loops over rows, the only ones."""
        requests = [self._table.request[slot] for slot in slots.tolist()]
        pieces = [row[:count] for row, count in zip(rows.tokens.tolist(), ends.kept.tolist(), strict=True)]
        emissions = list(map(_emission, zip(requests, pieces, repeat(None), repeat(None))))
        for emission in emissions:
            emission.request.output_ids += emission.token_ids
        if rows.logprobs is not None:
            emissions = [_with_logprobs(emission, rows.logprobs, i) for i, emission in enumerate(emissions)]
        ended = []
        for i in np.flatnonzero(ends.stopped | ends.at_limit | ends.failed).tolist():
            reason: FinishReason = "error" if ends.failed[i] else "stop" if ends.stopped[i] else "length"
            emissions[i] = emissions[i]._replace(finish_reason=reason)
            emissions[i].request.finish_reason = reason
            ended.append(emissions[i].request)
        return Settled(emissions, ended)

    def _count(self, slots: IntArray, rows: RowResults, kept: IntArray, room: IntArray, step: _DecodeStep) -> None:
        """Count a decode step, and what became of the drafts of the rows that speculate."""
        table, num_accepted = self._table, rows.num_emitted - 1
        table.decode_steps[slots] += 1
        table.off_graph_steps[slots] += step.off_graph
        speculate = table.speculates[slots]
        accepted, delivered = num_accepted[speculate], np.minimum(kept, num_accepted)[speculate]
        self._stats.record(step.num_draft, accepted, delivered)
        if rows.rejections is not None and step.num_draft:
            rejections, context = rows.rejections.take(speculate), rows.computed[speculate]
            verified = VerifiedRows(rejections, accepted, delivered, room[speculate], context)
            self._explain(slots[speculate], verified, step.num_draft)

    def _explain(self, slots: IntArray, rows: VerifiedRows, num_draft: int) -> None:
        """Count the causes of rejections, of all rows and for the request of each."""
        self._acceptance.record(rows, num_draft)
        for i, slot in enumerate(slots.tolist()):
            request = self._table.request[slot]
            assert request is not None
            if request.acceptance is None:
                request.acceptance = AcceptanceLog(self._max_draft)
            request.acceptance.record(rows.take(slice(i, i + 1)), num_draft)

    def _add_prompt_logprobs(self, chunks: PrefillRows, logprobs: LogprobRows) -> None:
        """Hand the log-probabilities of prompt tokens to the requests that want them. Chunks of one request are
        answered in order; after a preemption they start over."""
        ends = chunks.num_scored.cumsum()
        for i in np.flatnonzero(chunks.num_scored).tolist():
            slot, start, count = int(chunks.slots[i]), int(chunks.starts[i]), int(chunks.num_scored[i])
            request = self._table.request[slot]
            if self._table.epoch[slot] != chunks.epochs[i] or request is None:
                continue
            tokens, first = request.prompt_ids[start + 1 : start + 1 + count], int(ends[i]) - count
            own = logprobs.take(slice(first, first + count)).entries(tokens, request.params.prompt_logprobs or 0)
            request.prompt_logprobs[start + 1 :] = own


def _with_logprobs(emission: Emission, logprobs: LogprobRows, row: int) -> Emission:
    """`emission` with the log-probabilities of its tokens, if its request wants them."""
    request = emission.request
    if request.params.logprobs is None:
        return emission
    entries = logprobs.take(row).entries(emission.token_ids, request.params.logprobs)
    request.logprobs += entries
    return emission._replace(logprobs=entries)
