"""One completion of a request inside the engine. Host facts only, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphspec.records.acceptance import AcceptanceLog
from graphspec.records.detokenizer import IncrementalDetokenizer
from graphspec.records.outputs import FinishReason, TokenLogprobs
from graphspec.records.sampling_params import SamplingParams
from graphspec.records.token_rules import NO_RULES, TokenRules

# In `Request.rank` the priority is in the bits above those of the order of arrival.
MAX_PRIORITY = 1 << 20


def rank_of(priority: int, arrival: int) -> int:
    """Order of service: smaller priority first, then first come first served."""
    return (priority << 40) + arrival


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
    detokenizer: IncrementalDetokenizer | None = None  # None without a tokenizer
    page_hashes: list[bytes] = field(default_factory=list)  # chain over full pages, starting from hash_root
    hash_root: bytes = b""
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the output, if `params` requests them
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])  # of settled chunks
    acceptance: AcceptanceLog | None = None  # if rejections are explained, from the first decode step on
    finish_reason: FinishReason | None = None
    slot: int | None = None  # None while waiting and after the end
    num_preemptions: int = 0
    num_decode_steps: int = 0  # in slots it has left; `SlotTable` counts those in its present slot
    num_off_graph_steps: int = 0

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Log-probabilities of the prompt are still to be computed, so none of it may come from the prefix cache."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt_ids)
