"""From what users pass in to requests: prompts become token ids, and what cannot be served is refused."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from graphspec.models.paged_model import ModelFacts
from graphspec.records.config import ResolvedConfig
from graphspec.records.detokenizer import IncrementalDetokenizer
from graphspec.records.request import MAX_PRIORITY, Request, rank_of
from graphspec.records.sampling_params import SamplingParams
from graphspec.records.token_rules import TokenRules, spellings, token_rules

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class ProcessedInput(NamedTuple):
    """A request that can be served."""

    token_ids: list[int]
    params: SamplingParams
    rules: TokenRules


class InputProcessor:
    """Reads requests for one model and numbers them. `tokenizer` is a transformers tokenizer or None."""

    def __init__(self, tokenizer: Any, facts: ModelFacts, config: ResolvedConfig) -> None:
        self._tokenizer, self._facts, self._config = tokenizer, facts, config
        self._seeds = random.Random(config.user.seed)
        self._num_requests = self._num_completions = 0

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of text, of chat messages, or as they are. Raises ValueError without the tokenizer it needs."""
        if isinstance(prompt, (np.ndarray, torch.Tensor)):
            prompt = prompt.tolist()
        if not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt):
            return list(prompt)  # type: ignore[arg-type]
        if self._tokenizer is None:
            raise ValueError("this engine has no tokenizer: pass token ids")
        if isinstance(prompt, str):
            return list(self._tokenizer.encode(prompt))
        if not self.has_chat_template:
            raise ValueError("the tokenizer has no chat template: pass text or token ids")
        text = self._tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def process(self, prompt: Prompt, params: SamplingParams) -> ProcessedInput:
        """Read and check a request. Raises ValueError, in one sentence, for one that cannot be served."""
        token_ids = self.encode(prompt)
        return ProcessedInput(token_ids, params, self._check(token_ids, params))

    def completions(self, given: ProcessedInput, *, priority: int = 0, cache_salt: str = "") -> list[Request]:
        """The `n` completions of a request, which share its id and its seed. The first one that runs publishes the
        pages of the prompt, and the others find them in the prefix cache."""
        if not -MAX_PRIORITY < priority < MAX_PRIORITY:
            raise ValueError(f"priority must lie between -2**20 and 2**20, got {priority}")
        token_ids, params, rules = given
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        completions = [
            Request(
                request_id=str(self._num_requests),
                prompt_ids=token_ids,
                params=params if index == 0 else replace(params, prompt_logprobs=None),
                seed=seed,
                rank=rank_of(priority, self._num_completions + index),
                limit=min(len(token_ids) + params.max_tokens, self._config.max_model_len),
                stop_ids=self._stop_ids(params),
                index=index,
                rules=rules,
                cache_salt=cache_salt,
                detokenizer=self._detokenizer(params),
            )
            for index in range(params.n)
        ]
        self._num_requests += 1
        self._num_completions += params.n
        return completions

    def _detokenizer(self, params: SamplingParams) -> IncrementalDetokenizer | None:
        """What turns the tokens of one completion into text; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return IncrementalDetokenizer(self._tokenizer, params.stop, params.include_stop_str_in_output)

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._facts.eos_ids)

    def _check(self, token_ids: list[int], params: SamplingParams) -> TokenRules:
        """Raise ValueError for a request that cannot be served; return its rules."""
        if not token_ids:
            raise ValueError("the prompt is empty: give at least one token")
        if (params.stop or params.bad_words) and self._tokenizer is None:
            raise ValueError(
                "stop strings and bad words need a tokenizer, and this engine has none: "
                "use stop_token_ids and bad_words_ids"
            )
        bad_words = [*map(tuple, params.bad_words_ids), *spellings(params.bad_words, self._tokenizer)]
        self._check_ids(token_ids, params, bad_words)
        self._check_room(len(token_ids), params)
        return token_rules(
            allowed=params.allowed_token_ids,
            bias=params.logit_bias,
            bad_words=bad_words,
            held_ids=self._stop_ids(params) if params.min_tokens else (),
            until=len(token_ids) + params.min_tokens,
        )

    def _check_ids(self, token_ids: list[int], params: SamplingParams, bad_words: Sequence[Sequence[int]]) -> None:
        vocab = self._facts.vocab_size
        for what, ids in (
            ("prompt", token_ids),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias or ()),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("bad words", [token for word in bad_words for token in word]),
        ):
            bad = next((token for token in ids if not 0 <= token < vocab), None)
            if bad is not None:
                raise ValueError(f"token id {bad} in {what} is outside the vocabulary 0 .. {vocab - 1}")

    def _check_room(self, prompt_tokens: int, params: SamplingParams) -> None:
        config = self._config
        if prompt_tokens >= config.max_model_len:
            raise ValueError(
                f"the prompt has {prompt_tokens} tokens and max_model_len is {config.max_model_len}, which leaves no "
                "room for output: shorten the prompt or raise max_model_len"
            )
        pages = -(-min(prompt_tokens + params.max_tokens, config.max_model_len) // config.user.page_size)
        if pages > config.num_pages:
            raise ValueError(
                f"the request may need {pages} KV pages and the pool has {config.num_pages}: "
                "lower max_tokens, shorten the prompt or raise num_pages"
            )
