"""Shared by tests of sampling: rows of parameters, a chi-square test, and what transformers would draw from."""

from __future__ import annotations

import math

import torch
from transformers.generation import logits_process as hf

from graphspec import SamplingParams
from graphspec.sampling.rows import SamplingRows

PLAIN = SamplingParams(temperature=0.8)
FILTERS = [
    PLAIN,
    SamplingParams(temperature=1.4, top_k=5),
    SamplingParams(temperature=1.0, top_p=0.7),
    SamplingParams(temperature=0.9, min_p=0.12),
    SamplingParams(temperature=1.2, top_k=7, top_p=0.9, min_p=0.05),
]


def rows_of(params: list[SamplingParams], seeds: torch.Tensor, completion: int = 0) -> SamplingRows:
    """One row per seed (int64); a single set of parameters serves them all."""
    params = params * (len(seeds) // len(params))
    fields = [torch.tensor([getattr(p, name) for p in params]) for name in SamplingRows._fields[:4]]
    words = torch.stack((seeds, seeds >> 32), dim=1).to(torch.int32)
    return SamplingRows._make([*fields, words, torch.full((len(seeds),), completion, dtype=torch.int32)])


def assert_chi_square(outcomes: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Below 4.5 standard deviations (Wilson-Hilferty), and nothing impossible occurs."""
    expected = probabilities.flatten() * outcomes.numel()
    observed = outcomes.flatten().bincount(minlength=len(expected))
    assert not observed[expected == 0].any(), "an impossible outcome was drawn"
    likely, df = expected > 5, int((expected > 5).sum()) - 1
    chi = float(((observed - expected)[likely] ** 2 / expected[likely]).sum())
    z = ((chi / df) ** (1 / 3) - 1 + 2 / (9 * df)) / math.sqrt(2 / (9 * df))
    assert z < 4.5, f"chi-square {chi:.1f} for {df} degrees of freedom"


def expected_probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What transformers would draw from, for `logits` `[..., V]`."""
    scores = hf.TemperatureLogitsWarper(params.temperature)(None, logits.flatten(0, -2))
    scores = hf.TopKLogitsWarper(params.top_k)(None, scores) if params.top_k else scores
    scores = hf.TopPLogitsWarper(params.top_p)(None, scores) if params.top_p < 1 else scores
    scores = hf.MinPLogitsWarper(params.min_p)(None, scores) if params.min_p > 0 else scores
    return torch.as_tensor(scores).view_as(logits).softmax(-1)
