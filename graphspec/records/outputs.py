"""What a user gets back: outputs of steps, completions, log-probabilities. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from graphspec.records.acceptance import AcceptanceReport

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token at one position, and its rank there: 1 is the most likely token."""

    logprob: float
    rank: int


# One position: the token that stands there, and the most likely ones.
TokenLogprobs = dict[int, Logprob]


@dataclass(frozen=True)
class Usage:
    """Token counts of one completion; `completion_tokens` is the number of ids returned."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What one `Engine.step()` made known about one completion of a request.

    new_text         never ends in half a character; joined over a completion it is its text
    index            which of the `n` completions
    finished         this is the last output of the request: all its completions have ended
    logprobs         of the new tokens, if requested
    prompt_logprobs  if requested, with the first output of completion 0
    """

    request_id: str
    index: int
    new_token_ids: list[int]
    new_text: str
    finish_reason: FinishReason | None
    finished: bool
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(frozen=True)
class Completion:
    """A finished completion of a request.

    finish_reason   "stop" (end-of-sequence or a stop id, which is the last id), "length" (max_tokens or
                    max_model_len), "abort" or "error"
    seed            reproduces the text, given the same prompt, parameters and index
    num_decode_steps     decode steps it took part in: completion tokens per step say what speculation gave
    num_off_graph_steps  those of them that replayed no captured graph; `Engine.stats()` has the reasons
    synthetic       True when forced acceptance made the tokens: the text is then not the model's
    index           which of the `n` completions
    logprobs        per output token, if requested
    prompt_logprobs per prompt token, if requested, None for the first; with completion 0 only
    acceptance      of its drafts, if the engine explains it; None without a decode step
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
    index: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    acceptance: AcceptanceReport | None = None
