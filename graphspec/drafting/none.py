"""No drafts: the drafter of k = 0."""

from __future__ import annotations

import torch

from graphspec.drafting.protocol import DraftInputs, Drafts, HistoryDrafter


class NoDrafter(HistoryDrafter):
    name = "none"

    def propose(self, inputs: DraftInputs, num_draft: int) -> Drafts:
        assert num_draft == 0
        return Drafts(inputs.tokens[:, :0], torch.zeros_like(inputs.newest))
