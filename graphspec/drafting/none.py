"""No drafts: the drafter of k = 0."""

from __future__ import annotations

import torch


class NoDrafter:
    name = "none"
    forced_num_accepted: int | None = None

    def lookahead(self, num_draft: int) -> int:
        return 0

    def propose(self, history: torch.Tensor, lengths: torch.Tensor, num_draft: int) -> torch.Tensor:
        assert num_draft == 0
        return history[:, :0]
