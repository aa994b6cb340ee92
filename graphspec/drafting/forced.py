"""Forced acceptance, for benchmarks: separates the cost of the engine from the quality of a drafter."""

from __future__ import annotations

from graphspec.drafting.ngram import NgramDrafter
from graphspec.drafting.protocol import DraftInputs, Drafts, HistoryDrafter


class ForcedDrafter(HistoryDrafter):
    """Drafts like `ngram`, so that a step does the same work, and has exactly `num_accepted` drafts accepted.

    With num_accepted = 0 the text is the model's; otherwise it is not, and completions say so.
    """

    name = "forced"

    def __init__(self, drafter: NgramDrafter, num_accepted: int) -> None:
        self._drafter = drafter
        self.forced_num_accepted = num_accepted

    def propose(self, inputs: DraftInputs, num_draft: int) -> Drafts:
        return self._drafter.propose(inputs, num_draft)
