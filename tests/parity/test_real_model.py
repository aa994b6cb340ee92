"""The built-in model against transformers' `generate`: the same text for every k, depth, batch and drafter.

`make test` runs the QUICK cells, `make parity` all of them. `--prompts-file` names the prompts (text lines or
MT-bench jsonl); by default they are the repository's own.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from same_text import NearTies, Scorer, assert_same_text
from torch import nn
from transformers import AutoTokenizer

from graphspec import Engine, EngineConfig, SamplingParams
from graphspec.commands.prompt_files import BUILTIN_PROMPTS, read_prompts
from graphspec.models.builtin import NAME
from graphspec.models.loading import load_module, model_path

NUM_PROMPTS, NUM_TOKENS = 10, 64
DRAFTERS = {0: ("none",), 1: ("ngram", "forced"), 4: ("ngram", "forced")}
CELLS = [
    (k, depth, batch, drafter)
    for k, depth, batch in itertools.product((0, 1, 4), (0, 1, 2), (1, 10))
    for drafter in DRAFTERS[k]
]
QUICK = {(0, 0, 10, "none"), (4, 1, 10, "ngram"), (4, 2, 1, "ngram")}
SAMPLED = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, seed=20)


def cells() -> list[Any]:
    return [pytest.param(*cell, marks=pytest.mark.parity if cell not in QUICK else ()) for cell in CELLS]


@dataclass
class Oracle:
    """The model, its prompts, and lazily the texts to compare with."""

    module: nn.Module
    prompts: list[list[int]]

    def __post_init__(self) -> None:
        self.scorer = Scorer(self.module)
        self.ties = {"greedy": NearTies(), "sampled": NearTies()}
        self._greedy: list[list[int]] = []
        self._sampled: list[list[int]] = []
        self._sampled_invariant: list[list[int]] = []

    def greedy(self) -> list[list[int]]:
        """transformers' `generate`, one prompt at a time."""
        if not self._greedy:
            self.module.set_attn_implementation("sdpa")  # type: ignore[operator]
            for prompt in self.prompts:
                out = self.module.generate(  # type: ignore[operator]
                    torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=2
                )
                self._greedy.append(out[0, len(prompt) :].tolist())
        return self._greedy

    def sampled(self) -> list[list[int]]:
        """The plainest engine: k = 0, synchronous, one request at a time."""
        if not self._sampled:
            self._sampled = self.run(SAMPLED, num_speculative_tokens=0, depth=0, max_num_seqs=1)
        return self._sampled

    def sampled_invariant(self) -> list[list[int]]:
        """The same under `batch_invariant`."""
        if not self._sampled_invariant:
            plainest: dict[str, Any] = {"num_speculative_tokens": 0, "depth": 0, "max_num_seqs": 1}
            self._sampled_invariant = self.run(SAMPLED, batch_invariant=True, **plainest)
        return self._sampled_invariant

    def run(self, params: SamplingParams, **config: Any) -> list[list[int]]:
        with Engine(self.module, config=EngineConfig(max_model_len=1024, **config)) as engine:
            return [c.token_ids for c in engine.generate(self.prompts, params, progress=False)]


@pytest.fixture(scope="module")
def oracle(request: pytest.FixtureRequest) -> Iterator[Oracle]:
    torch.set_num_threads(os.cpu_count() or 1)
    file = request.config.getoption("--prompts-file") or BUILTIN_PROMPTS
    tokenizer = AutoTokenizer.from_pretrained(model_path(NAME))
    prompts = []
    for text in read_prompts(Path(file), NUM_PROMPTS):
        chat = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer.encode(rendered, add_special_tokens=False))
    yield Oracle(load_module(NAME, torch.float32, torch.device("cpu")), prompts)
    torch.set_num_threads(1)


@pytest.mark.parametrize(("k", "depth", "batch", "drafter"), cells())
def test_greedy_text_is_that_of_transformers(oracle: Oracle, k: int, depth: int, batch: int, drafter: str) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS)
    expected = oracle.greedy()
    texts = oracle.run(params, num_speculative_tokens=k, depth=depth, max_num_seqs=batch, drafter=drafter)
    for prompt, a, b in zip(oracle.prompts, expected, texts, strict=True):
        assert_same_text(oracle.scorer, prompt, a, b, oracle.ties["greedy"])
    oracle.ties["greedy"].check()


@pytest.mark.parity
@pytest.mark.parametrize(
    ("k", "depth", "batch", "drafter"),
    [
        (0, 1, 10, "none"),
        (1, 0, 10, "ngram"),
        (4, 0, 1, "ngram"),
        (4, 1, 10, "ngram"),
        (4, 2, 7, "forced"),
        (7, 1, 3, "ngram"),
    ],
)
def test_sampled_text_depends_on_the_seed_only(oracle: Oracle, k: int, depth: int, batch: int, drafter: str) -> None:
    expected = oracle.sampled()
    texts = oracle.run(SAMPLED, num_speculative_tokens=k, depth=depth, max_num_seqs=batch, drafter=drafter)
    assert texts != oracle.greedy()
    for prompt, a, b in zip(oracle.prompts, expected, texts, strict=True):
        assert_same_text(oracle.scorer, prompt, a, b, oracle.ties["sampled"], SAMPLED, SAMPLED.seed or 0)
    oracle.ties["sampled"].check()


@pytest.mark.parametrize(
    "config",
    [
        {"num_speculative_tokens": 5, "max_num_seqs": 10, "depth": 2},
        pytest.param(
            {"num_speculative_tokens": 3, "max_num_seqs": 4, "max_prefill_tokens": 100}, marks=pytest.mark.parity
        ),
        pytest.param({"num_speculative_tokens": 5, "adaptive_speculation": True}, marks=pytest.mark.parity),
        pytest.param({"num_speculative_tokens": 4, "num_pages": 40}, marks=pytest.mark.parity),  # preemption
    ],
)
def test_batch_invariant_text_is_equal_without_exceptions(oracle: Oracle, config: dict[str, Any]) -> None:
    assert oracle.run(SAMPLED, batch_invariant=True, **config) == oracle.sampled_invariant()
