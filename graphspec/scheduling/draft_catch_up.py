"""What a drafter with KV of its own has read of each slot, while it is left out of steps with k = 0. No torch.

Such a step emits exactly one token per row, so once the step that left the drafter behind is answered, the host knows
exactly what the drafter has missed, launches in flight included. It reads that in chunks before it drafts again.
"""

from __future__ import annotations

import numpy as np

from graphspec.records.launch import IntArray, PrefillRows
from graphspec.scheduling.slot_table import DECODE, UNREAD_NONE, SlotTable


def fall_behind(table: SlotTable, slots: IntArray) -> None:
    """The drafter does not read what a launch emits for `slots`. Where that begins is known with the answer."""
    new = slots[table.unread[slots] == UNREAD_NONE]
    table.unread[new], table.unread_known[new] = table.settled[new], False


def learn_unread(table: SlotTable, slots: IntArray, computed: IntArray) -> None:
    """The answer to a launch without drafting, for rows that had `computed` tokens before it."""
    waiting = (table.unread[slots] != UNREAD_NONE) & ~table.unread_known[slots]
    table.unread[slots[waiting]] = computed[waiting] + 1
    table.unread_known[slots[waiting]] = True


def catch_up_chunks(table: SlotTable, budget: int, step: int) -> tuple[PrefillRows | None, bool]:
    """Chunks, of at most `budget` tokens, of what the drafter has not read when launch `step` decodes, and whether it
    has read everything with them."""
    behind = np.flatnonzero((table.phase == DECODE) & (table.unread != UNREAD_NONE))
    ready = table.unread_known[behind] & (table.placeholders[behind] == table.sampling[behind])
    slots = behind[ready]
    missing = table.settled[slots] + table.placeholders[slots] - table.unread[slots]
    lengths = np.minimum(missing, np.maximum(0, budget - (missing.cumsum() - missing)))
    all_read = bool(ready.all() and (lengths == missing).all())
    slots, lengths = slots[lengths > 0], lengths[lengths > 0]
    starts = table.unread[slots].copy()
    table.unread[slots] += lengths
    if all_read:
        table.unread[behind] = UNREAD_NONE
    if not len(slots):
        return None, all_read
    table.last_step[slots] = step
    nothing = np.zeros(len(slots), np.int64)
    chunks = PrefillRows(
        slots=slots,
        epochs=table.epoch[slots],
        starts=starts,
        lengths=lengths,
        final=nothing > 0,
        scored_to=nothing,
        page_table=table.page_table[slots],
        sampler="greedy",
    )
    return chunks, all_read
