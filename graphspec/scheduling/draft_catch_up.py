"""Where a drafter with KV of its own stands in each slot, while it is left out of steps with k = 0. No torch.

Such a step emits exactly one token per row, so once the first one that left the drafter out is answered, the host knows
exactly which tokens the drafter has missed, launches in flight included. The drafter reads them in chunks before it
drafts again.
"""

from __future__ import annotations

import numpy as np

from graphspec.records.launch import IntArray, PrefillRows
from graphspec.scheduling.launch_rows import launch_catch_up
from graphspec.scheduling.slot_table import DECODE, SlotTable

UP_TO_DATE = np.iinfo(np.int64).max


class DraftCatchUp:
    """Per slot, the leading tokens whose KV the drafter has, UP_TO_DATE if it has taken part in every launch."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._computed = np.full(table.num_slots, UP_TO_DATE, np.int64)
        self._exact = np.zeros(table.num_slots, np.bool_)  # else a lower bound, until a launch in flight is answered

    def num_computed(self, slot: int) -> int:
        return int(self._computed[slot])

    def reset(self, slot: int) -> None:
        self._computed[slot] = UP_TO_DATE

    def left_out(self, slots: IntArray) -> None:
        """The drafter takes no part in a launch that emits tokens for `slots`."""
        new = slots[self._computed[slots] == UP_TO_DATE]
        self._computed[new], self._exact[new] = self._table.settled[new], False

    def answered(self, slots: IntArray, epochs: IntArray, computed: IntArray) -> None:
        """The answer to such a launch, for rows that had `computed` tokens before it. The first one since the drafter
        was up to date tells where it stopped."""
        current = self._table.epoch[slots] == epochs
        first = current & (self._computed[slots] != UP_TO_DATE) & ~self._exact[slots]
        self._computed[slots[first]] = computed[first] + 1
        self._exact[slots[first]] = True

    def next_chunks(self, budget: int, step: int) -> tuple[PrefillRows | None, bool]:
        """Chunks of at most `budget` tokens for launch `step`, out of what the drafter has missed by the time that
        launch decodes; and whether it is up to date with them."""
        table = self._table
        behind = np.flatnonzero((table.phase == DECODE) & (self._computed != UP_TO_DATE))
        # The number of tokens in flight must be certain: the drafter may only read what exists when the launch runs.
        known = self._exact[behind] & (table.placeholders[behind] == table.min_in_flight[behind])
        slots = behind[known]
        missing = table.settled[slots] + table.placeholders[slots] - self._computed[slots]
        lengths = np.minimum(missing, np.maximum(0, budget - (missing.cumsum() - missing)))
        up_to_date = bool(known.all() and (lengths == missing).all())
        slots, lengths = slots[lengths > 0], lengths[lengths > 0]
        starts = self._computed[slots].copy()
        self._computed[slots] += lengths
        if up_to_date:
            self._computed[behind] = UP_TO_DATE
        return (launch_catch_up(table, slots, starts, lengths, step) if len(slots) else None), up_to_date

    def check(self) -> None:
        """Assert that only slots in use are behind."""
        assert (self._computed[self._table.phase != DECODE] == UP_TO_DATE).all(), "a drafter is behind in a free slot"
