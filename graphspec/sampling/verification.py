"""Acceptance: pure on tensors, static shapes, no host reads."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Verdict(NamedTuple):
    """What a step decided about its drafts, per row."""

    emitted: torch.Tensor  # [R, 1 + k] int64, accepted drafts, then the bonus; what follows is no output
    num_emitted: torch.Tensor  # [R] int64, 1 .. 1 + k
    newest: torch.Tensor  # [R] int64, the bonus


def verify(drafts: torch.Tensor, samples: torch.Tensor, most: torch.Tensor, forced: int | None = None) -> Verdict:
    """Accept `drafts` `[R, k]` while they equal the target's `samples` `[R, 1 + k]`, at most `most` `[R]` of them; the
    first sample that differs, or the one after the last draft, is the bonus.

    Each sample is an exact draw given the tokens before it, and a sample is used only if all of those were emitted,
    so the output follows the target's distribution whatever the drafts are. The acceptance probability of a draft d
    is p(d), that of ratio rejection with a deterministic draft (Leviathan et al. 2023, arXiv:2211.17192).

    `forced` overrides the count with a fixed one (benchmarks); the comparison is still computed.
    """
    num_accepted = leading_matches(drafts, samples[:, :-1])
    if forced is not None:
        num_accepted = num_accepted * 0 + forced
    num_accepted = torch.minimum(num_accepted, most)
    position = torch.arange(samples.shape[1], device=samples.device)
    padded = torch.cat((drafts, samples[:, -1:]), dim=1)
    emitted = torch.where(position < num_accepted.unsqueeze(1), padded, samples)
    newest = samples.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
    return Verdict(emitted, num_accepted + 1, newest)


def leading_matches(drafts: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    """How many leading `drafts` `[R, K]` equal the `samples` `[R, Q]` at their positions; at most the smaller width."""
    width = min(drafts.shape[1], samples.shape[1])
    return (drafts[:, :width] == samples[:, :width]).to(torch.int64).cumprod(dim=1).sum(dim=1)
