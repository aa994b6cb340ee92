"""No drafts: the drafter of k = 0."""

from __future__ import annotations

import torch

from graphspec.drafting.protocol import DraftInputs, HistoryDrafter


class NoDrafter(HistoryDrafter):
    name = "none"

    def propose(self, inputs: DraftInputs, num_draft: int) -> torch.Tensor:
        assert num_draft == 0
        return inputs.tokens[:, :0]
