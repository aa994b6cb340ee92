"""What a drafter is."""

from __future__ import annotations

from typing import Protocol

import torch


class Drafter(Protocol):
    """Proposes the drafts of the next step, on the device, as the last part of the captured step.

    `propose` has static shapes and reads nothing back to the host. It sees the tokens accepted in this very step.
    """

    name: str

    # Exactly this many drafts count as accepted in every step, whatever the target says; None: the target decides.
    forced_num_accepted: int | None

    def lookahead(self, num_draft: int) -> int:
        """KV positions past the upper bound of a request that drafting itself writes."""

    def propose(self, history: torch.Tensor, lengths: torch.Tensor, num_draft: int) -> torch.Tensor:
        """Drafts `[R, num_draft]` (int64, legal token ids) that continue the rows.

        `history` `[R, H]` holds the token at each position, `lengths` `[R]` how many are valid (at least 1); what
        lies beyond is stale and must not be used.
        """
