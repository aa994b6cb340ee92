"""How many drafts each launch consumes and proposes. All that depends on a k that changes is behind this. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from graphspec.records.launch import DecodeRows, PrefillRows, RowResults, StepPlan, StepResult
from graphspec.scheduling.draft_catch_up import UP_TO_DATE, DraftCatchUp
from graphspec.scheduling.draft_policy import AdaptiveK, step_towards
from graphspec.scheduling.slot_table import DECODE, SlotTable


class DraftCounts(NamedTuple):
    """Drafts per row of one launch: those it verifies, and those it proposes for the launch after it."""

    consumed: int
    proposed: int


class DraftController:
    """Asked once per launch how many drafts it has; told what was launched and what was answered.

    `tiers` is every k a step may have, ascending; `pad` gives the rows of the captured step that serves so many;
    `reads_prompt` and `drafts_ahead` are those of the drafter, see `drafting.protocol`.
    """

    def __init__(
        self,
        table: SlotTable,
        *,
        tiers: tuple[int, ...],
        pad: Callable[[int], int],
        reads_prompt: bool,
        drafts_ahead: bool,
    ) -> None:
        self.policy = AdaptiveK(tiers, table.num_slots, pad)
        self._table, self._tiers, self._drafts_ahead = table, tiers, drafts_ahead
        self._catch_up = DraftCatchUp(table) if reads_prompt else None
        self._proposed = tiers[-1] if drafts_ahead else tiers[0]  # by the newest launch

    # Before a launch.

    def choose(self) -> DraftCounts:
        """A drafter that drafts ahead always proposes the most, and the choice is about the launch itself. Otherwise it
        is about the one after it, and goes to a neighbouring tier, for which there is a graph."""
        table, most = self._table, self._tiers[-1]
        if not self.policy.chooses:
            return DraftCounts(most, most)
        decoding = table.phase == DECODE
        wanted = self.policy.choose(int(decoding.sum()), np.flatnonzero(decoding & table.speculates))
        if self._drafts_ahead:
            return DraftCounts(wanted, most)
        return DraftCounts(self._proposed, step_towards(self._tiers, self._proposed, wanted))

    def catch_up(self, drafts: DraftCounts, budget: int, step: int) -> tuple[DraftCounts, PrefillRows | None]:
        """What the drafter must read, at most `budget` tokens, to propose drafts again in launch `step` after launches
        that left it out. As long as it is not up to date it proposes none."""
        if self._catch_up is None or drafts.consumed or not drafts.proposed:
            return drafts, None
        chunks, up_to_date = self._catch_up.next_chunks(budget, step)
        return (drafts if up_to_date else drafts._replace(proposed=0)), chunks

    # Afterwards.

    def launched(self, plan: StepPlan) -> None:
        self._proposed = plan.num_draft_next
        if plan.decode is not None:
            self.policy.launched(plan.decode.num_draft)
        if self._catch_up is not None and not plan.num_draft_next:
            if plan.decode is not None:
                self._catch_up.left_out(plan.decode.slots)
            if plan.prefill is not None:
                self._catch_up.left_out(plan.prefill.final_slots)

    def answered(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from an answer, before the slots that end with it are given back."""
        prefill, decode = plan.prefill, plan.decode
        if self._catch_up is not None and not plan.num_draft_next:
            if prefill is not None and result.prefill is not None:
                final = prefill.final
                self._catch_up.answered(prefill.slots[final], prefill.epochs[final], result.prefill.computed[final])
            if decode is not None and result.decode is not None:
                self._catch_up.answered(decode.slots, decode.epochs, result.decode.computed)
        if self.policy.chooses and decode is not None and result.decode is not None:
            self._learn(decode, result.decode, result.seconds)

    def _learn(self, decode: DecodeRows, rows: RowResults, seconds: float | None) -> None:
        judged = (self._table.epoch[decode.slots] == decode.epochs) & self._table.speculates[decode.slots]
        # Of drafts that are made ahead, the one behind the verified ones was judged as well.
        visible = min(decode.num_draft + self._drafts_ahead, self._tiers[-1])
        slots, matching = decode.slots[judged], rows.num_matching_drafts[judged]
        self.policy.answered(len(decode.slots), decode.num_draft, seconds, slots, matching, visible)

    # Slots change hands.

    def admitted(self, slot: int) -> None:
        self.policy.acceptance.begin(slot)

    def freed(self, slot: int) -> None:
        if self._catch_up is not None:
            self._catch_up.reset(slot)

    def num_computed(self, slot: int) -> int:
        """Leading tokens of a slot whose KV the drafter has, or has no need of."""
        return UP_TO_DATE if self._catch_up is None else self._catch_up.num_computed(slot)

    def check(self) -> None:
        """Assert every invariant."""
        if self._catch_up is not None:
            self._catch_up.check()
