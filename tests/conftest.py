"""Tiny random models, built on the spot and cached; nothing is downloaded."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from graphspec import Engine, StepOutput

sys.path.insert(0, str(Path(__file__).parent))  # the shared helpers beside this file

VOCAB = 211

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.13,  # varied greedy text, with repetitions for n-grams to find
}

OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24},
}


# Tiny models gain nothing from two threads, and OpenMP teams that wait for each other on a busy machine are 30 times
# slower. The real-model tests set their own number.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--prompts-file", help="prompts for the real-model tests: text lines or MT-bench jsonl")
    parser.addoption("--flashinfer-required", action="store_true", help="a skipped FlashInfer test is a failure")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With --flashinfer-required, a FlashInfer test that is skipped fails."""
    report = yield
    required = item.config.getoption("--flashinfer-required")
    if report.skipped and required and item.get_closest_marker("flashinfer") is not None:
        report.outcome = "failed"
        report.longrepr = f"FlashInfer tests are required here, and this one was skipped: {report.longrepr}"
    return report


@pytest.fixture(autouse=True)
def checked_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine in every test checks the scheduler's invariants after every step."""
    step = Engine.step

    def checked(engine: Engine) -> list[StepOutput]:
        outputs = step(engine)
        engine._scheduler.check([launched.plan for launched in engine._pipeline.in_flight])
        return outputs

    monkeypatch.setattr(Engine, "step", checked)


@pytest.fixture
def known_rates(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Benchmarks take the machine for one that reads 1 GB/s and multiplies 1 GFLOP/s."""
    from graphspec.commands.bench import speed_of_light

    for rate in ("read_bandwidth", "matrix_rate"):
        monkeypatch.setattr(speed_of_light, rate, lambda *_: 1e9)
    speed_of_light.measured_rates.cache_clear()
    yield
    speed_of_light.measured_rates.cache_clear()


@pytest.fixture(scope="session")
def host_planner(pytestconfig: pytest.Config) -> Any:
    """FlashInfer's planner, compiled for the CPU on first use; skips where that cannot be."""
    from emulated_fa2 import HostPlanner, build_planner, flashinfer_data, why_not

    if reason := why_not():
        pytest.skip(reason)
    from flashinfer.version import __version__

    cache = pytestconfig.cache
    assert cache is not None
    return HostPlanner(build_planner(flashinfer_data(), cache.mkdir(f"flashinfer-{__version__}")))


@functools.cache
def _original(architecture: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(architecture, **{**COMMON, **OWN[architecture]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert isinstance(model, nn.Module)
    return model.eval().requires_grad_(False)


def tiny_model(architecture: str = "llama") -> nn.Module:
    """A fresh copy of a tiny random model; every call returns equal weights."""
    return copy.deepcopy(_original(architecture))


def half_model(architecture: str = "llama") -> nn.Module:
    """A tiny model whose weights half precision holds, as those of most checkpoints."""
    model = tiny_model(architecture)
    for parameter in model.parameters():
        parameter.copy_(parameter.half())
    return model


@pytest.fixture(scope="session")
def tiny_llama() -> nn.Module:
    """One float32 model to score with; do not give it to an engine."""
    return tiny_model("llama")


@functools.cache
def byte_tokenizer() -> Any:
    """A byte-level tokenizer of 259 ids with a chat template: the ids 0..2 are <pad>, <s> and </s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=template
    )


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a byte-level tokenizer, as a folder in Hugging Face layout."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(11)
    config = AutoConfig.for_model("llama", **{**COMMON, "vocab_size": 259})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
