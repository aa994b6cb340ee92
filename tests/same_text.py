"""What "the same text" means, in one place.

Kernels of different shapes round differently, so two runs whose row counts, chunks, batches or k differ may part at a
near-tie. `assert_same_text` accepts a first difference only if float64, teacher forced on the common prefix and with
the same noise, shows that the two candidates were nearly equal, or that a filter's threshold was. What follows is then
not compared. Near-ties are counted by `NearTies`, and more than one per 2,000 tokens fails.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from graphspec import SamplingParams
from graphspec.sampling.keyed_sampling import PURPOSE_TARGET, gumbel, position_keys
from graphspec.sampling.rows import as_int32

TOLERANCE = 1e-3


@dataclass
class NearTies:
    """Counts tokens compared and near-ties met; `check` holds them to one per 2,000 tokens."""

    tokens: int = 0
    found: list[str] = field(default_factory=list)

    def check(self) -> None:
        print(f"\n{len(self.found)} near-ties in {self.tokens} tokens", *self.found, sep="\n  ")
        assert len(self.found) <= math.ceil(self.tokens / 2000), "too many near-ties to be rounding"


@dataclass
class Scorer:
    """A float64 copy of a transformers model."""

    model: nn.Module

    def __post_init__(self) -> None:
        self.model = copy.deepcopy(self.model).double()
        self.model.set_attn_implementation("eager")  # type: ignore[operator]

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits `[V]` of the token after `token_ids`."""
        with torch.no_grad():
            out = self.model(input_ids=torch.tensor([list(token_ids)]), use_cache=False)
        logits: torch.Tensor = out.logits[0, -1]
        return logits

    @property
    def eos_ids(self) -> set[int]:
        config: Any = self.model.generation_config
        return set(config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id])


def assert_same_text(
    scorer: Scorer,
    prompt: Sequence[int],
    first: Sequence[int],
    second: Sequence[int],
    ties: NearTies,
    params: SamplingParams | None = None,
    seed: int = 0,
    index: int = 0,
) -> None:
    """Assert that two outputs for `prompt` are the same, up to a first near-tie. `index` is that of the completion."""
    at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    if at is None:
        assert len(first) == len(second), f"one text is a prefix of the other: {len(first)} and {len(second)} tokens"
        ties.tokens += len(first)
        return
    ties.tokens += at + 1
    known, params = [*prompt, *first[:at]], params or SamplingParams()
    logits = processed(scorer.logits(known), known, len(prompt), params, scorer.eos_ids)
    gap = decision_gap(logits, len(known), first[at], second[at], params, seed, index)
    assert gap < TOLERANCE, f"texts differ at output token {at}: {first[at]} or {second[at]}, decided by {gap:.2e}"
    ties.found.append(f"output token {at}: {first[at]} or {second[at]}, gap {gap:.1e}")


def processed(
    logits: torch.Tensor, known: Sequence[int], num_prompt: int, params: SamplingParams, eos_ids: set[int]
) -> torch.Tensor:
    """The logits `[V]` of the token after `known` as the rules of `params` leave them, written the long way."""
    new = logits.clone()
    for token in range(len(new)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            new[token] = -math.inf
        new[token] += (params.logit_bias or {}).get(token, 0.0)
    for *prefix, last in params.bad_words_ids:
        if len(prefix) <= len(known) and list(known[len(known) - len(prefix) :]) == prefix:
            new[last] = -math.inf
    if len(known) - num_prompt < params.min_tokens:
        new[sorted({*params.stop_token_ids, *(set() if params.ignore_eos else eos_ids)})] = -math.inf
    output = list(known[num_prompt:])
    for token in set(known):
        new[token] *= params.repetition_penalty if new[token] <= 0 else 1 / params.repetition_penalty
        if token in output:
            new[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return new


def decision_gap(
    logits: torch.Tensor, position: int, a: int, b: int, params: SamplingParams, seed: int, index: int = 0
) -> float:
    """How far the decision between tokens `a` and `b` was from a tie, in units of logits (or of probability mass
    where top-p decided). `logits` are processed."""
    assert torch.isfinite(logits[[a, b]]).all(), f"a forbidden token was drawn: {a} or {b}"
    temperature = params.temperature
    if temperature == 0:
        return abs(float(logits[a] - logits[b]))
    words = torch.tensor([[as_int32(seed), as_int32(seed >> 32)]], dtype=torch.int32)
    completion = torch.tensor([index], dtype=torch.int32)
    keys = position_keys(words, completion, torch.tensor([[position]]), PURPOSE_TARGET)[0, 0]
    ids = torch.arange(len(logits), dtype=torch.int32)
    scores = logits + temperature * gumbel(keys, ids).double()
    gaps = [abs(float(scores[a] - scores[b]))]

    scaled = logits / temperature
    if params.top_k:
        threshold = scaled.topk(min(params.top_k, len(logits))).values[-1]
        gaps += [abs(float(scaled[t] - threshold)) * temperature for t in (a, b)]
        scaled = scaled.masked_fill(scaled < threshold, -math.inf)
    probabilities = scaled.softmax(-1)
    for token in (a, b):
        if params.top_p < 1:
            before = float(probabilities[probabilities > probabilities[token]].sum())
            gaps.append(abs(before - params.top_p))
        if params.min_p > 0:
            gaps.append(abs(float(scaled[token] - scaled.max()) - math.log(params.min_p)) * temperature)
    return min(gaps)
