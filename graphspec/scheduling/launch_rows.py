"""From slots to the rows of a launch. What a launch adds to its slots is entered in the table here. No torch."""

from __future__ import annotations

import numpy as np

from graphspec.records.launch import Admission, DecodeRows, IntArray, PrefillRows, placeholders_of_decode
from graphspec.records.request import Request
from graphspec.records.sampling_params import sampler_kind
from graphspec.scheduling.slot_table import DECODE, SlotTable

Chunk = tuple[int, int]  # slot, tokens of its prompt


def admission_of(request: Request, slot: int, salt: int) -> Admission:
    return Admission(
        slot=slot,
        token_ids=np.array(request.token_ids, np.int32),
        num_prompt=len(request.prompt_ids),
        params=request.params,
        rules=request.rules,
        seed=request.seed,
        index=request.index,
        salt=salt,
    )


def launch_decode(table: SlotTable, slots: IntArray, num_draft: int, step: int) -> DecodeRows | None:
    """A decode row for each of `slots` in launch `step`; None without any."""
    if not len(slots):
        return None
    rows = DecodeRows(
        slots=slots,
        epochs=table.epoch[slots],
        computed_bound=table.settled[slots] - 1 + table.placeholders[slots],
        page_table=table.page_table[slots],
        num_draft=num_draft,
        sampler=_sampler_of(table, slots),
    )
    table.add_in_flight(slots, placeholders_of_decode(num_draft))
    table.last_step[slots] = step
    return rows


def launch_prefill(table: SlotTable, chunks: list[Chunk], step: int) -> PrefillRows | None:
    """`chunks`, which the table counts as prefilled already, as rows of launch `step`; None without any. Slots whose
    prompt ends with its chunk decode from the next launch on."""
    if not chunks:
        return None
    slots, lengths = np.array(chunks, np.int64).T
    final = table.prefilled[slots] == table.settled[slots]
    rows = PrefillRows(
        slots=slots,
        epochs=table.epoch[slots],
        starts=table.prefilled[slots] - lengths,
        lengths=lengths,
        final=final,
        scored_to=table.scored_to[slots],
        page_table=table.page_table[slots],
        sampler=_sampler_of(table, slots),
    )
    table.phase[slots[final]] = DECODE
    table.add_in_flight(slots[final], 1)
    table.last_step[slots] = step
    return rows


def launch_catch_up(table: SlotTable, slots: IntArray, starts: IntArray, lengths: IntArray, step: int) -> PrefillRows:
    """Chunks of tokens that the target has computed and only the drafter reads: they sample and return nothing."""
    table.last_step[slots] = step
    nothing = np.zeros(len(slots), np.int64)
    return PrefillRows(
        slots=slots,
        epochs=table.epoch[slots],
        starts=starts,
        lengths=lengths,
        final=nothing > 0,
        scored_to=nothing,
        page_table=table.page_table[slots],
        sampler="greedy",
    )


def _sampler_of(table: SlotTable, slots: IntArray) -> str:
    return sampler_kind(int(np.bitwise_or.reduce(table.sampler_needs[slots])))
