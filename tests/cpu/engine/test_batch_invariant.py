"""`batch_invariant`: the same bits for a token whatever else is in its launch, so no near-tie is ever met."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from conftest import VOCAB, half_model, tiny_model
from torch import nn

from attention import NoNativeError
from graphspec import Completion, Engine, EngineConfig, EngineStats, SamplingParams
from graphspec.models.packed_linears import check_batch_invariance
from graphspec.sampling.logprobs import token_logprobs


def missing() -> str:
    try:
        check_batch_invariance(torch.device("cpu"))
    except ValueError as reason:
        return str(reason)
    return ""


pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

PARAMS = [
    SamplingParams(max_tokens=32, logprobs=2),
    SamplingParams(max_tokens=32, temperature=0.8, seed=1, logprobs=2),
    SamplingParams(max_tokens=32, temperature=1.1, top_k=20, top_p=0.9, seed=2, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=32, temperature=0.9, top_p=0.8, repetition_penalty=1.2, seed=3, logprobs=2),
]

VARIANTS: dict[str, dict[str, Any]] = {
    "k 0, together": {"num_speculative_tokens": 0},
    "k 1, small chunks of prompts": {"num_speculative_tokens": 1, "max_prefill_tokens": 5},
    "k 4, five at once": {"num_speculative_tokens": 4, "depth": 2, "max_num_seqs": 5},
    "k 7": {"num_speculative_tokens": 7, "depth": 3, "max_num_seqs": 12},
    "k 4, preempted": {"num_speculative_tokens": 4, "depth": 2, "num_pages": 24},
    "k adapted": {"num_speculative_tokens": 5, "adaptive_speculation": True},
    "a draft model": {"num_speculative_tokens": 3, "draft": "qwen3"},
    "eager": {"num_speculative_tokens": 3, "enforce_eager": True},
}


def prompts(count: int) -> list[list[int]]:
    """Random prompts with a repeated part, so that n-grams match, two of which begin alike."""
    rng = random.Random(count)
    parts = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 12))] * rng.randint(1, 4) for _ in range(count)]
    return [*parts[:-1], parts[0] + parts[-1]]


def run(
    architecture: str, every: list[list[int]], params: list[SamplingParams], *, draft: str = "", **config: Any
) -> tuple[list[Completion], EngineStats]:
    config = {"max_num_seqs": 8, "page_size": 8, "max_model_len": 160, "max_prefill_tokens": 32, **config}
    other = half_model(draft) if draft else None
    with Engine(
        half_model(architecture), config=EngineConfig(batch_invariant=True, **config), draft_model=other
    ) as engine:
        return engine.generate(every, params, progress=False), engine.stats()


def alone(architecture: str, count: int) -> list[Completion]:
    """k = 0, depth 0, one request at a time: the plainest engine."""
    return [
        run(
            architecture,
            [prompt],
            [PARAMS[i % len(PARAMS)]],
            num_speculative_tokens=0,
            depth=0,
            max_num_seqs=1,
        )[0][0]
        for i, prompt in enumerate(prompts(count))
    ]


@pytest.fixture(scope="module")
def baseline() -> list[Completion]:
    return alone("llama", 12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_log_probability_has_the_bits_of_a_request_alone(baseline: list[Completion], variant: str) -> None:
    done, stats = run("llama", prompts(12), [PARAMS[i % len(PARAMS)] for i in range(12)], **VARIANTS[variant])
    for one, other in zip(baseline, done, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs
    assert (stats.num_preemptions > 0) == ("preempted" in variant)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma2", "mistral"])
def test_other_architectures(architecture: str) -> None:
    params = [PARAMS[i % len(PARAMS)] for i in range(6)]
    done, _ = run(architecture, prompts(6), params, num_speculative_tokens=4, max_prefill_tokens=7)
    for one, other in zip(alone(architecture, 6), done, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs


class Product(nn.Module):
    """Stands in for a linear layer, and is none."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weight = model.get_parameter("model.layers.1.mlp.down_proj.weight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


def test_what_cannot_be_invariant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match=r"cannot hold \d+ of this model's weights: leave it out, or load"):
        Engine(model, config=EngineConfig(batch_invariant=True))
    Engine(model, config=EngineConfig()).close()  # the model was given back
    model = half_model("llama")
    model.get_submodule("model.layers.1.mlp").set_submodule("down_proj", Product(model))
    with pytest.raises(ValueError, match="and 1 matrix products of this model are neither: leave it out"):
        Engine(model, config=EngineConfig(batch_invariant=True))
    for config in ({"compile": True}, {"pack_weights": False}, {"attention_backend": "reference"}):
        with pytest.raises(ValueError, match="batch_invariant"):
            EngineConfig(batch_invariant=True, **config)
    with pytest.raises(ValueError, match="batch_invariant needs a CPU with AVX2"):
        check_batch_invariance(torch.device("cuda"))

    def no_library() -> None:
        raise NoNativeError("no C++ compiler was found: set CXX")

    monkeypatch.setattr("graphspec.models.packed_linears.native_library", no_library)
    with pytest.raises(ValueError, match=r"and no C\+\+ compiler was found: set CXX"):
        Engine.from_pretrained("no-such-model", EngineConfig(batch_invariant=True, device="cpu"))


@pytest.mark.parametrize("threads", [1, 2])
def test_log_probabilities_of_a_row_do_not_depend_on_other_rows(threads: int) -> None:
    """The vocabulary is large enough for torch to share one sum out among threads."""
    logits = 4 * torch.randn(8, 3, 50_000, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(24).view(8, 3)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = token_logprobs(logits, tokens)
        alone = [token_logprobs(logits[i, j], tokens[i, j]) for i in range(8) for j in range(3)]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together.flatten(0, 1), torch.stack(alone))
