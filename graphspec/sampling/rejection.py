"""Why a draft was rejected, measured on the device where the logits are. Only in steps that are asked for it."""

from __future__ import annotations

import torch

from graphspec.sampling.row_sampler import RowSampler
from graphspec.sampling.verification import Verdict

# Columns behind the tokens of an output row, about the first draft that was not accepted.
REJECTION = 3


def rejection(
    processed: torch.Tensor, drafts: torch.Tensor, verdict: Verdict, num_valid: torch.Tensor, sampler: RowSampler
) -> torch.Tensor:
    """`[R, REJECTION]` (int32) about the draft at index `num_emitted - 1` of each row, which means nothing if all were
    accepted: its rank among the processed logits (1 is the likeliest token, 0 a forbidden one), by how much the
    probability of the likeliest token exceeds its own (bits of a float32, at the temperature of the row, 1 for
    greedy), and whether it was filler.
    """
    place = (verdict.num_emitted - 1).clamp(max=drafts.shape[1] - 1).unsqueeze(1)  # [R, 1]
    logits = processed.gather(1, place.unsqueeze(2).expand(-1, 1, processed.shape[2])).squeeze(1).float()  # [R, V]
    draft = drafts.gather(1, place)
    own = logits.gather(1, draft)
    earlier = torch.arange(logits.shape[1], device=logits.device) < draft  # of equals the first is the likeliest
    ahead = (logits > own) | ((logits == own) & earlier)
    rank = torch.where(own > float("-inf"), ahead.sum(dim=1, keepdim=True) + 1, 0)
    if sampler.base != "greedy":
        temperature = sampler.params.temperature
        logits = logits / torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    probabilities = logits.softmax(dim=1)
    gap = probabilities.amax(dim=1, keepdim=True) - probabilities.gather(1, draft)
    filler = place >= num_valid.unsqueeze(1)
    return torch.cat((rank.to(torch.int32), gap.view(torch.int32), filler.to(torch.int32)), dim=1)
