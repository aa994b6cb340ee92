"""Requests, sampling parameters and what a user gets back. Host facts only, no torch."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from graphspec.acceptance import AcceptanceLog, AcceptanceReport
from graphspec.rules import NO_RULES, TokenRules
from graphspec.text import TextStream

# A priority stands above the order of arrival in `Request.rank`.
MAX_PRIORITY = 1 << 20

FinishReason = Literal["stop", "length", "abort", "error"]

# A row with 1 <= top_k <= this finds its threshold among so many candidates; anything wider needs a full sort.
MAX_BOUNDED_TOP_K = 64

# Most alternatives that log-probabilities are returned for, per position.
MAX_LOGPROBS = 20


def rank_of(priority: int, arrival: int) -> int:
    """Order of service: smaller priority first, then first come first served."""
    return (priority << 40) + arrival


class SamplerNeeds(enum.IntFlag):
    """What a row asks of the sampler. The union over a batch chooses the kind of graph (`sampler_kind`)."""

    NOTHING = 0
    NOISE = 1  # noise over the whole vocabulary, no ordering
    TOP_K = 2  # at most MAX_BOUNDED_TOP_K candidates
    SORT = 4  # top-p without such a top-k, or a wider top-k
    PROCESSORS = 8  # penalties, biases, forbidden tokens: logits that depend on the tokens before them
    LOGPROBS = 16


@functools.cache  # asked in every step, and flags are slow
def sampler_kind(needs: int) -> str:
    """The cheapest sampler that serves every row.

    "greedy", "plain", "bounded" and "sorted" each serve what the ones before them serve. "+processors", "+logprobs" or
    both come on top of the last two only, where the rest of a sampled step is cheap beside them: ten kinds instead of
    sixteen, since every kind may be a captured graph at every number of rows.
    """
    extras = "+processors" * bool(needs & SamplerNeeds.PROCESSORS) + "+logprobs" * bool(needs & SamplerNeeds.LOGPROBS)
    if needs & SamplerNeeds.SORT:
        return "sorted" + extras
    if needs & SamplerNeeds.TOP_K or extras:
        return "bounded" + extras
    return "plain" if needs & SamplerNeeds.NOISE else "greedy"


class KindParts(NamedTuple):
    """A kind of sampler, taken apart."""

    base: str
    processors: bool
    logprobs: bool


@functools.cache
def kind_parts(sampler: str) -> KindParts:
    base, *extras = sampler.split("+")
    return KindParts(base, "processors" in extras, "logprobs" in extras)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    n                completions to draw for the prompt, which share its KV pages; needs temperature > 0
    max_tokens       most tokens to generate, >= 1
    temperature      0 is greedy (the default); > 0 divides the logits
    top_k            keep the k most likely tokens; 0 keeps all
    top_p            keep the smallest set of tokens whose probability reaches p; 1 keeps all
    min_p            drop tokens less likely than min_p times the most likely one; 0 drops none
    repetition_penalty   divides positive and multiplies negative logits of tokens in prompt or output; 1 is off
    presence_penalty     subtracted from the logits of tokens in the output; -2 .. 2
    frequency_penalty    subtracted once per occurrence in the output; -2 .. 2
    logit_bias       added to the logits of these token ids; -100 .. 100
    allowed_token_ids    nothing else is sampled; None allows all
    bad_words        texts that must not appear, as the tokenizer writes them with and without a space before them
    bad_words_ids    token sequences that must not appear: the last token of one is forbidden where the others precede
                     it, in the prompt too. At most 128 sequences longer than one token, of at most 16 tokens
    seed             64-bit; the text depends on seed and prompt only. None: one is drawn and reported
    stop_token_ids   end on these too, besides the model's own end-of-sequence ids
    stop             end when one of these strings appears in the text, which is cut before it; the ids returned
                     include the token that completed it
    include_stop_str_in_output   cut the text after the stop string instead
    min_tokens       stop ids cannot be sampled before this many tokens, and no stop string counts
    ignore_eos       do not end on the model's end-of-sequence ids
    logprobs         return the log-probability of every token, and of the so many most likely ones; at most 20. They
                     are the log-softmax of the model's logits, before temperature and everything else named here
    prompt_logprobs  the same for every token of the prompt but the first; what is cached of the prompt is then
                     computed again
    speculation      False: accept no drafts for this request. Its rows stay 1 + k wide, its text is the same, and it
                     is not counted in the acceptance statistics

    The order is: allowed tokens, bias, bad words and min_tokens, penalties (repetition first), temperature, top-k,
    top-p, min-p. Raises ValueError for values outside these ranges. A request whose rules forbid every token at some
    position ends there with finish reason "error".
    """

    n: int = 1
    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    bad_words_ids: Sequence[Sequence[int]] = ()
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    speculation: bool = True

    def __post_init__(self) -> None:
        rules = (
            (self.n >= 1, f"n must be at least 1, got {self.n}"),
            (self.n == 1 or self.temperature > 0, "n > 1 needs temperature > 0: greedy completions are all the same"),
            (self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens}"),
            (0.0 <= self.temperature < float("inf"), f"temperature must be finite and >= 0, got {self.temperature}"),
            (self.top_k >= 0, f"top_k must be 0 (off) or positive, got {self.top_k}"),
            (0.0 < self.top_p <= 1.0, f"top_p must be in (0, 1], got {self.top_p}"),
            (0.0 <= self.min_p <= 1.0, f"min_p must be in [0, 1], got {self.min_p}"),
            (0.0 < self.repetition_penalty < float("inf"),
             f"repetition_penalty must be finite and > 0 (1 is off), got {self.repetition_penalty}"),
            (-2.0 <= self.presence_penalty <= 2.0, f"presence_penalty must be in [-2, 2], got {self.presence_penalty}"),
            (-2.0 <= self.frequency_penalty <= 2.0,
             f"frequency_penalty must be in [-2, 2], got {self.frequency_penalty}"),
            (all(-100.0 <= bias <= 100.0 for bias in (self.logit_bias or {}).values()),
             "logit_bias values must be in [-100, 100]: to forbid a token use bad_words_ids"),
            (self.allowed_token_ids is None or len(self.allowed_token_ids) > 0,
             "allowed_token_ids must not be empty: None allows every token"),
            (not isinstance(self.bad_words, str) and all(word.strip() for word in self.bad_words),
             "bad_words must be a list of non-empty strings"),
            (all(len(word) > 0 for word in self.bad_words_ids), "bad_words_ids must hold non-empty lists of token ids"),
            (not isinstance(self.stop, str) and all(self.stop), "stop must be a list of non-empty strings"),
            (0 <= self.min_tokens <= self.max_tokens, f"min_tokens must be in 0 .. max_tokens, got {self.min_tokens}"),
            (self.seed is None or 0 <= self.seed < 2**64, f"seed must be in 0 .. 2**64 - 1, got {self.seed}"),
            (self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
             f"logprobs must be in 0 .. {MAX_LOGPROBS}, got {self.logprobs}"),
            (self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS,
             f"prompt_logprobs must be in 0 .. {MAX_LOGPROBS}, got {self.prompt_logprobs}"),
        )  # fmt: skip
        for holds, sentence in rules:
            if not holds:
                raise ValueError(sentence)

    @property
    def needs(self) -> SamplerNeeds:
        needs = SamplerNeeds.NOTHING
        if self.temperature > 0.0:
            if 1 <= self.top_k <= MAX_BOUNDED_TOP_K:
                needs = SamplerNeeds.TOP_K
            else:
                needs = SamplerNeeds.SORT if self.top_k or self.top_p < 1.0 else SamplerNeeds.NOISE
        penalties = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        holds_stop_ids = self.min_tokens > 0 and (not self.ignore_eos or len(self.stop_token_ids) > 0)
        if penalties or self.logit_bias or self.allowed_token_ids is not None or holds_stop_ids:
            needs |= SamplerNeeds.PROCESSORS
        if self.bad_words or self.bad_words_ids:
            needs |= SamplerNeeds.PROCESSORS
        return needs if self.logprobs is None else needs | SamplerNeeds.LOGPROBS


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token at one position, and its rank there: 1 is the most likely token."""

    logprob: float
    rank: int


# One position: the token that stands there, and the most likely ones.
TokenLogprobs = dict[int, Logprob]


@dataclass(eq=False)
class Request:
    """One completion of a request inside the engine, from `add_request` to its last token.

    `output_ids` holds settled tokens only: tokens whose acceptance the host has seen and which were delivered.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    rank: int  # smaller is served first and preempted last: by priority, then by arrival
    limit: int  # prompt + output may reach this many tokens: min(prompt + max_tokens, max_model_len)
    stop_ids: frozenset[int]
    index: int = 0  # of `n` completions of the same prompt, which share request id and seed
    rules: TokenRules = NO_RULES
    cache_salt: str = ""  # shares cached prefixes only with requests of the same salt
    text: TextStream | None = None
    page_hashes: list[bytes] = field(default_factory=list)  # chain over full pages, starting from hash_root
    hash_root: bytes = b""
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the output, if `params` asks for them
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])  # of settled chunks
    acceptance: AcceptanceLog | None = None  # if it is explained, from the first decode step on
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

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Positions of the prompt are still to be scored, so none of it may come from the cache."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt_ids)


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
    logprobs         of the new tokens, if asked for
    prompt_logprobs  if asked for, with the first output of completion 0
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
    logprobs        per output token, if asked for
    prompt_logprobs per prompt token, if asked for, None for the first; with completion 0 only
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
