"""How a request is sampled and when it ends, and which kind of sampler serves a batch. No torch."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# A row with 1 <= top_k <= this finds its threshold among so many candidates; anything wider needs a full sort.
MAX_BOUNDED_TOP_K = 64

# Most alternatives that log-probabilities are returned for, per position.
MAX_LOGPROBS = 20


class SamplerNeeds(enum.IntFlag):
    """What a row needs of the sampler. The union over a batch decides the kind of sampler (`sampler_kind`)."""

    NOTHING = 0
    NOISE = 1  # noise over the whole vocabulary, no ordering
    TOP_K = 2  # at most MAX_BOUNDED_TOP_K candidates
    SORT = 4  # top-p without such a top-k, or a wider top-k
    PROCESSORS = 8  # penalties, biases, forbidden tokens: logits that depend on the tokens before them
    LOGPROBS = 16


@functools.cache  # looked up in every step, and operations on flags are slow
def sampler_kind(needs: int) -> str:
    """The cheapest sampler that serves every row.

    Of "greedy", "plain", "bounded" and "sorted" each also serves what those before it serve. "+processors", "+logprobs"
    or both exist with the last two only, where the rest of a sampled step costs little beside them: ten kinds instead
    of sixteen, since every kind may be a captured graph at every number of rows.
    """
    extras = "+processors" * bool(needs & SamplerNeeds.PROCESSORS) + "+logprobs" * bool(needs & SamplerNeeds.LOGPROBS)
    if needs & SamplerNeeds.SORT:
        return "sorted" + extras
    if needs & SamplerNeeds.TOP_K or extras:
        return "bounded" + extras
    return "plain" if needs & SamplerNeeds.NOISE else "greedy"


class KindParts(NamedTuple):
    """What the name of a kind of sampler consists of."""

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
