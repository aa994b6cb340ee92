"""Requests, sampling parameters and what a user gets back. Host facts only, no torch."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from graphspec.text import TextStream

# A priority stands above the order of arrival in `Request.rank`.
MAX_PRIORITY = 1 << 20

FinishReason = Literal["stop", "length", "abort", "error"]

# A row with 1 <= top_k <= this takes its candidates from one bounded top-k; anything wider needs a full sort.
MAX_BOUNDED_TOP_K = 64


def rank_of(priority: int, arrival: int) -> int:
    """Order of service: smaller priority first, then first come first served."""
    return (priority << 40) + arrival


class SamplerNeeds(enum.IntFlag):
    """What a row asks of the sampler. The union over a batch chooses the kind of graph (`sampler_kind`)."""

    NOTHING = 0
    NOISE = 1  # noise over the whole vocabulary, no ordering
    TOP_K = 2  # at most MAX_BOUNDED_TOP_K candidates
    SORT = 4  # top-p without such a top-k, or a wider top-k


def sampler_kind(needs: int) -> str:
    """The cheapest sampler that serves every row: "greedy", "plain", "bounded" or "sorted"."""
    if needs & SamplerNeeds.SORT or needs & (mixed := SamplerNeeds.NOISE | SamplerNeeds.TOP_K) == mixed:
        return "sorted"
    if needs & SamplerNeeds.TOP_K:
        return "bounded"
    return "plain" if needs & SamplerNeeds.NOISE else "greedy"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    max_tokens       most tokens to generate, >= 1
    temperature      0 is greedy (the default); > 0 divides the logits
    top_k            keep the k most likely tokens; 0 keeps all
    top_p            keep the smallest set of tokens whose probability reaches p; 1 keeps all
    min_p            drop tokens less likely than min_p times the most likely one; 0 drops none
    seed             64-bit; the text depends on seed and prompt only. None: one is drawn and reported
    stop_token_ids   end on these too, besides the model's own end-of-sequence ids
    stop             end when one of these strings appears in the text, which is cut before it; the ids returned
                     include the token that completed it
    include_stop_str_in_output   cut the text after the stop string instead
    min_tokens       no stop rule applies before this many tokens
    ignore_eos       do not end on the model's end-of-sequence ids
    speculation      False: accept no drafts for this request. Its rows stay 1 + k wide, its text is the same, and it
                     is not counted in the acceptance statistics

    Raises ValueError for values outside these ranges.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    speculation: bool = True

    def __post_init__(self) -> None:
        rules = (
            (self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens}"),
            (0.0 <= self.temperature < float("inf"), f"temperature must be finite and >= 0, got {self.temperature}"),
            (self.top_k >= 0, f"top_k must be 0 (off) or positive, got {self.top_k}"),
            (0.0 < self.top_p <= 1.0, f"top_p must be in (0, 1], got {self.top_p}"),
            (0.0 <= self.min_p <= 1.0, f"min_p must be in [0, 1], got {self.min_p}"),
            (not isinstance(self.stop, str) and all(self.stop), "stop must be a list of non-empty strings"),
            (0 <= self.min_tokens <= self.max_tokens, f"min_tokens must be in 0 .. max_tokens, got {self.min_tokens}"),
            (self.seed is None or 0 <= self.seed < 2**64, f"seed must be in 0 .. 2**64 - 1, got {self.seed}"),
        )
        for holds, sentence in rules:
            if not holds:
                raise ValueError(sentence)

    @property
    def needs(self) -> SamplerNeeds:
        if self.temperature == 0.0:
            return SamplerNeeds.NOTHING
        if 1 <= self.top_k <= MAX_BOUNDED_TOP_K:
            return SamplerNeeds.TOP_K
        return SamplerNeeds.SORT if self.top_k or self.top_p < 1.0 else SamplerNeeds.NOISE


@dataclass(eq=False)
class Request:
    """One request inside the engine, from `add_request` to its last token.

    `output_ids` holds settled tokens only: tokens whose acceptance the host has seen and which were delivered.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    rank: int  # smaller is served first and preempted last: by priority, then by arrival
    limit: int  # prompt + output may reach this many tokens: min(prompt + max_tokens, max_model_len)
    stop_ids: frozenset[int]
    cache_salt: str = ""  # shares cached prefixes only with requests of the same salt
    text: TextStream | None = None
    page_hashes: list[bytes] = field(default_factory=list)  # chain over full pages, starting from hash_root
    hash_root: bytes = b""
    output_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    slot: int | None = None  # while running
    num_preemptions: int = 0
    num_decode_steps: int = 0  # of the slots it has left; `SlotTable` counts in the present one
    num_off_graph_steps: int = 0

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)


@dataclass(frozen=True)
class Usage:
    """Token counts of one request; `completion_tokens` is the number of ids returned."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class StepOutput:
    """What one `Engine.step()` made known about one request.

    `new_text` never ends in half a character; joined over a request it is the text of its completion.
    """

    request_id: str
    new_token_ids: list[int]
    new_text: str
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Completion:
    """A finished request.

    finish_reason   "stop" (end-of-sequence or a stop id, which is the last id), "length" (max_tokens or
                    max_model_len), "abort" or "error"
    seed            reproduces the text, given the same prompt and parameters
    num_decode_steps     decode steps it took part in: completion tokens per step say what speculation gave
    num_off_graph_steps  those of them that replayed no captured graph; `Engine.stats()` has the reasons
    synthetic       True when forced acceptance made the tokens: the text is then not the model's
    """

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    usage: Usage
    seed: int
    num_decode_steps: int
    num_off_graph_steps: int
    synthetic: bool
