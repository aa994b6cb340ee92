"""Engine configuration: what a user may set, and the same with everything decided. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DTYPE_NAMES = ("float32", "bfloat16", "float16")
DRAFTERS = ("auto", "none", "ngram", "draft_model", "forced")
MAX_NGRAM_POOL = 1 << 22  # 192 MiB with n-grams of 4 tokens


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything tunable. None (or "auto") means: decided from the model and the machine at start-up.

    num_speculative_tokens   k >= 0, drafts per request in every decode step; 0 turns speculation off
    adaptive_speculation     choose k anew for every step, for the whole batch, from measured step times and acceptance;
                             num_speculative_tokens is then the most, and 0 is chosen where speculation does not pay
    speculation_tiers        the k to choose among, ascending, num_speculative_tokens the last; None: 0, 1, 2, 4 ...
    drafter                  "ngram" proposes from the request's own text, "draft_model" with a second model, "none"
                             only with k = 0, "forced" accepts exactly `forced_num_accepted` drafts per step
                             (benchmarks: the text is not the model's); "auto" is "draft_model" if there is one, else
                             "ngram"
    draft_model              a causal LM with the same tokenizer: built-in name, folder or hub id
    explain_acceptance       find out why drafts are rejected, see `Engine.explain_acceptance`; costs a little time
    draft_shares_noise       the draft model samples with the target's noise and processors; else it is greedy
    ngram_min, ngram_max     shortest and longest n-gram that "ngram" matches
    ngram_pool               entries of a table in which "ngram" looks up what followed the same `ngram_max` tokens in
                             other requests, where a request's own text has no match; 0 is off. What this means for
                             privacy is said in drafting/pool.py
    depth                    launches in flight beyond the one whose answer is taken; 0 is synchronous, 1 the default
    page_size                tokens per KV page
    num_pages                KV pages; None: as many as max_num_seqs requests of max_model_len need, but at most
                             `kv_memory_fraction` of the free memory
    max_num_seqs             requests that run at once
    max_model_len            most tokens of a request, prompt and output; None: the model's own limit
    max_prefill_tokens       prompt tokens per launch; decode rows never wait for this budget
    dtype                    "auto" (the checkpoint's), "float32", "bfloat16" or "float16"
    device                   "auto", "cpu" or "cuda"
    attention_backend        "auto", "cpu" ("cpu_native", built with the machine's C++ compiler, or without one
                             "cpu_torch"), "reference" (plain, any device), "flashinfer_xqa", "flashinfer_fa2" (keys
                             not split) or "flashinfer_fa2_split"; "auto" is "cpu" on the CPU, and on CUDA chooses per
                             batch size, see attention/flashinfer/choice.py
    attention_table          JSON file of measurements that "auto" follows where it has one
    capture                  "lazy" captures a graph when its key is first needed, "eager" captures all before serving.
                             "auto" is lazy on the CPU; on CUDA it captures before serving what batches usually need,
                             and with penalties or log-probabilities, which bring kinds of their own, on first use
    graph_rows               row counts that have a graph, ascending, max_num_seqs the last; a batch is padded up to
                             one. None: 1, 2, 3, 4, 6, 8, 12, 16, 24 ..., so that at most half of a launch is padding
    self_test                check every graph at start-up, replay against eager and garbage in the padding; implies
                             capture "eager"
    enforce_eager            run decode steps without captured graphs or compilation: the oracle of every graph
    compile                  hand what a graph captures to Inductor first; None: off on the CPU, on with CUDA
    pack_weights             keep the weights of linear layers once more, in half precision and in the order in which
                             products read them, where that loses less than a rounding of float32 (checkpoints in
                             bfloat16 or float16); they must not change while the engine lives. None: on where it can
                             be, on a CPU with AVX2
    batch_invariant          the logits of a token have the same bits for every batch, k, chunking of prompts and after
                             preemption, so texts are equal without exceptions; on the CPU, for models all of whose
                             linear layers can be packed, at the price of a few padded rows
    debug                    check every invariant of the scheduler, and who writes which buffer, in every step (slow)
    watchdog_seconds         report a launch that does not come back for so long; 0 is off
    seed                     seeds the seeds of requests that bring none; None: from the operating system

    Raises ValueError for values that cannot work together.
    """

    num_speculative_tokens: int = 3
    adaptive_speculation: bool = False
    speculation_tiers: tuple[int, ...] | None = None
    drafter: str = "auto"
    draft_model: str | None = None
    draft_shares_noise: bool = True
    explain_acceptance: bool = False
    forced_num_accepted: int = 0
    ngram_min: int = 2
    ngram_max: int = 4
    ngram_pool: int = 0
    depth: int = 1
    page_size: int = 16
    num_pages: int | None = None
    kv_memory_fraction: float = 0.3
    max_num_seqs: int = 16
    max_model_len: int | None = None
    max_prefill_tokens: int = 1024
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    attention_backend: str = "auto"
    attention_table: str | None = None
    capture: Literal["auto", "lazy", "eager"] = "auto"
    graph_rows: tuple[int, ...] | None = None
    self_test: bool = False
    enforce_eager: bool = False
    compile: bool | None = None
    pack_weights: bool | None = None
    batch_invariant: bool = False
    debug: bool = False
    watchdog_seconds: float = 120.0
    seed: int | None = None

    def __post_init__(self) -> None:
        k = self.num_speculative_tokens
        rules = (
            (0 <= k <= 64, f"num_speculative_tokens must be in 0 .. 64, got {k}; 0 turns speculation off"),
            (self.speculation_tiers is None or self.adaptive_speculation,
             "speculation_tiers are what adaptive_speculation chooses among: set it, or leave them out"),
            (k > 0 or not self.adaptive_speculation,
             "adaptive_speculation needs num_speculative_tokens above 0, the most drafts of a step"),
            (self.speculation_tiers is None or _are_tiers(self.speculation_tiers, k),
             f"speculation_tiers must ascend from 0 or more to num_speculative_tokens ({k}), got "
             f"{self.speculation_tiers}"),
            (self.drafter in DRAFTERS, f'unknown drafter "{self.drafter}": use one of {", ".join(DRAFTERS)}'),
            (k == 0 or self.drafter != "none", 'drafter "none" drafts nothing: set num_speculative_tokens=0 with it'),
            (self.draft_model is None or self.drafter in ("auto", "draft_model"),
             f'drafter "{self.drafter}" uses no draft_model: leave one of the two out'),
            (0 <= self.forced_num_accepted <= k or self.drafter != "forced",
             f"forced_num_accepted must be in 0 .. num_speculative_tokens ({k}), got {self.forced_num_accepted}"),
            (1 <= self.ngram_min <= self.ngram_max <= 16,
             f"need 1 <= ngram_min <= ngram_max <= 16, got {self.ngram_min} and {self.ngram_max}"),
            (0 <= self.ngram_pool <= MAX_NGRAM_POOL,
             f"ngram_pool must be in 0 .. {MAX_NGRAM_POOL} entries (0 is off), got {self.ngram_pool}"),
            (not self.ngram_pool or (self.drafter in ("auto", "ngram") and self.draft_model is None),
             'ngram_pool serves the drafter "ngram": leave draft_model and other drafters out with it'),
            (0 <= self.depth <= 8, f"depth must be in 0 .. 8, got {self.depth}"),
            (self.page_size >= 1, f"page_size must be positive, got {self.page_size}"),
            (self.num_pages is None or self.num_pages >= 1, f"num_pages must be positive, got {self.num_pages}"),
            (0.0 < self.kv_memory_fraction <= 1.0,
             f"kv_memory_fraction must be in (0, 1], got {self.kv_memory_fraction}"),
            (self.max_num_seqs >= 1, f"max_num_seqs must be positive, got {self.max_num_seqs}"),
            (self.max_model_len is None or self.max_model_len >= 2,
             f"max_model_len must be at least 2 (one prompt and one output token), got {self.max_model_len}"),
            (self.max_prefill_tokens >= 1, f"max_prefill_tokens must be positive, got {self.max_prefill_tokens}"),
            (self.watchdog_seconds >= 0, f"watchdog_seconds must be >= 0 (0 is off), got {self.watchdog_seconds}"),
            (self.capture in ("auto", "lazy", "eager"), f'unknown capture "{self.capture}": use auto, lazy or eager'),
            (not self.self_test or (self.capture != "lazy" and not self.enforce_eager),
             "self_test checks graphs at start-up: leave capture and enforce_eager at their defaults with it"),
            (not self.batch_invariant or self.pack_weights is not False,
             "batch_invariant needs packed weights: leave pack_weights out with it"),
            (not self.batch_invariant or not self.compile,
             "batch_invariant: compiled code rounds differently for every shape: leave compile out with it"),
            (not self.batch_invariant or self.attention_backend in ("auto", "cpu", "cpu_native"),
             f'batch_invariant needs attention_backend "auto" or "cpu_native", got "{self.attention_backend}"'),
            (self.dtype in ("auto", *DTYPE_NAMES),
             f'unknown dtype "{self.dtype}": use auto or one of {", ".join(DTYPE_NAMES)}'),
        )  # fmt: skip
        for holds, sentence in rules:
            if not holds:
                raise ValueError(sentence)


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """The numbers the engine runs with, all decided. `user` is the configuration they follow from."""

    user: EngineConfig
    max_model_len: int
    num_pages: int
    history_width: int  # token positions a slot can hold: room for launches in flight past max_model_len
    table_width: int  # page-table entries that cover history_width

    @property
    def num_draft(self) -> int:
        return self.user.num_speculative_tokens

    @property
    def tiers(self) -> tuple[int, ...]:
        """Every k that a step may have, ascending."""
        if not self.user.adaptive_speculation:
            return (self.num_draft,)
        return self.user.speculation_tiers or halving_tiers(self.num_draft)

    @property
    def explains_acceptance(self) -> bool:
        """Whether rejections are explained: only if there are drafts to reject."""
        return self.user.explain_acceptance and self.num_draft > 0


def _are_tiers(tiers: tuple[int, ...], most: int) -> bool:
    return len(tiers) > 0 and tiers[0] >= 0 and tiers[-1] == most and tiers == tuple(sorted(set(tiers)))


def cache_dir() -> Path:
    """Where converted models are kept: `$XDG_CACHE_HOME/graphspec`, by default `~/.cache/graphspec`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "graphspec"


def halving_tiers(most: int) -> tuple[int, ...]:
    """0, 1 and so on up to `most`, each about twice the one before: 0, 1, 2, 4, 7 for 7."""
    tiers = {0}
    while most > 0:
        tiers.add(most)
        most = (most + 1) // 2 if most > 1 else 0
    return tuple(sorted(tiers))
