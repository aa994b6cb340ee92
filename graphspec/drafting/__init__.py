"""Drafters, one file each, behind one protocol: they propose the tokens that the next step verifies, on the device. It
imports sampling and models; execution imports it. Start with protocol.py.
"""

import torch

from graphspec.drafting.draft_model import DraftModelDrafter
from graphspec.drafting.forced import ForcedDrafter
from graphspec.drafting.ngram import NgramDrafter
from graphspec.drafting.none import NoDrafter
from graphspec.drafting.pool import NgramPool
from graphspec.drafting.protocol import Drafter, DrafterBuffers, DraftInputs, Drafts, HistoryDrafter, PromptChunks
from graphspec.models.paged_model import PagedModel
from graphspec.models.paging import Paging, attach_kv
from graphspec.records.config import ResolvedConfig

__all__ = [
    "DraftInputs",
    "DraftModelDrafter",
    "Drafter",
    "DrafterBuffers",
    "Drafts",
    "ForcedDrafter",
    "HistoryDrafter",
    "NgramDrafter",
    "NgramPool",
    "NoDrafter",
    "PromptChunks",
    "create_drafter",
]


def create_drafter(
    config: ResolvedConfig, draft: PagedModel | None, paging: Paging, vocab_size: int, device: torch.device
) -> Drafter:
    """The drafter a configuration names; without speculation it is always `NoDrafter`. `draft` is the draft model,
    `vocab_size` that of the target."""
    user = config.user
    if config.num_draft == 0:
        return NoDrafter()
    if draft is not None:
        attention = attach_kv(draft, config, device)
        return DraftModelDrafter(draft, attention, paging, vocab_size, shares_noise=user.draft_shares_noise)
    pool = NgramPool(user.ngram_pool, user.ngram_max, user.max_num_seqs, device) if user.ngram_pool else None
    ngram = NgramDrafter(user.ngram_min, user.ngram_max, pool)
    return ForcedDrafter(ngram, user.forced_num_accepted) if user.drafter == "forced" else ngram
