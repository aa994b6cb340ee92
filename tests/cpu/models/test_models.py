"""Every supported architecture generates what transformers generates."""

import pytest
import torch
from conftest import COMMON, OWN, VOCAB, tiny_model
from same_text import NearTies, Scorer, assert_same_text

from graphspec import Engine, EngineConfig, SamplingParams
from graphspec.models.paged_model import UnsupportedModelError, check_config

PROMPTS = [
    torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 2, 7, 16, 33, 61)
]


def reference(model: torch.nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    out = model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False)  # type: ignore[operator]
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("architecture", sorted(OWN))
def test_greedy_text_is_that_of_transformers(architecture: str, k: int) -> None:
    original = tiny_model(architecture)
    ties, scorer = NearTies(), Scorer(original)
    config = EngineConfig(num_speculative_tokens=k, max_num_seqs=4, max_prefill_tokens=24, page_size=8, dtype="float32")
    with Engine(tiny_model(architecture), config=config) as engine:
        done = engine.generate(PROMPTS, SamplingParams(max_tokens=40), progress=False)
    for prompt, completion in zip(PROMPTS, done, strict=True):
        assert_same_text(scorer, prompt, reference(original, prompt, 40), completion.token_ids, ties)
    ties.check()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
        ({"kv_lora_rank": 16}, "latent"),
        ({"num_kv_shared_layers": 2}, "shared"),
    ],
)
def test_architectures_that_would_compute_wrong_text_are_refused(change: dict[str, object], named: str) -> None:
    from transformers import LlamaConfig

    with pytest.raises(UnsupportedModelError, match=named):
        check_config(LlamaConfig(**{**COMMON, **change}))


def test_attention_sinks_are_refused() -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    model = GptOssForCausalLM(GptOssConfig(**{**COMMON, "num_local_experts": 2, "head_dim": 16}))
    with pytest.raises(UnsupportedModelError, match=r"sinks|rope"):
        Engine(model)


def test_a_model_serves_one_engine_at_a_time_and_is_given_back() -> None:
    model = tiny_model()
    before = reference(model, PROMPTS[2], 8)
    with Engine(model) as engine:
        with pytest.raises(ValueError, match="already belongs to an engine"):
            Engine(model)
        assert engine.generate([PROMPTS[2]], SamplingParams(max_tokens=8), progress=False)[0].token_ids == before
    assert reference(model, PROMPTS[2], 8) == before
    assert not any(name.endswith("paged_kv") for name, _ in model.named_buffers())
