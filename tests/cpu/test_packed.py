"""Packed weights: the same products up to rounding, only of weights that lose nothing, and the same text."""

from __future__ import annotations

import logging
import shutil
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from same_text import NearTies, Scorer, assert_same_text
from torch import nn
from torch.nn.functional import linear

from graphs import LinearPacker, PersistentBuffers, capture, check_packing, compare_replay, record
from graphs.packed import fits_half, has_fbgemm
from graphspec import Engine, EngineConfig, SamplingParams

CAN_COMPILE = shutil.which("g++") is not None and (Path(sysconfig.get_path("include")) / "Python.h").exists()
needs_fbgemm = pytest.mark.skipif(not has_fbgemm(), reason="needs FBGEMM and AVX2")


def half_values(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random float32 numbers that half precision holds exactly."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half().float()


def assert_rounding(product: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """`product` is `x @ weight.T + bias`, each number within the bound of a float32 sum of that many terms."""
    exact = linear(x.double(), weight.double(), None if bias is None else bias.double())
    terms = linear(x.double().abs(), weight.double().abs(), None if bias is None else bias.double().abs())
    assert ((product.double() - exact).abs() <= (weight.shape[1] + 1) * 2.0**-24 * terms).all()


@needs_fbgemm
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 16, 33])
def test_a_packed_product_is_the_plain_one_up_to_rounding(biased: bool, rows: int) -> None:
    x, weight = torch.randn(rows, 2, 37), half_values(50, 37)
    bias = torch.randn(50) if biased else None
    packer = LinearPacker([weight] if bias is None else [weight, bias])
    program, _ = record(lambda: linear(x, weight, bias), packer)
    assert (packer.num_packed, packer.num_refused) == (1, 0)
    for _ in range(2):
        x.normal_()
        out = program.run()
        assert isinstance(out, torch.Tensor)
        assert out.shape == (rows, 2, 50)
        assert_rounding(out, x, weight, bias)


@needs_fbgemm
def test_a_weight_of_several_layers_and_graphs_is_packed_once() -> None:
    x, shared, own = torch.randn(3, 8), half_values(8, 8), half_values(5, 8, seed=1)

    def tower(rows: int) -> torch.Tensor:
        return linear(linear(linear(x[:rows], shared), shared), own)

    packer = LinearPacker([nn.Parameter(shared), own])  # the same memory by another name, as after tying
    for rows in (1, 3):
        record(partial(tower, rows), packer)
    assert packer.num_packed == 2


def untouched(fn: Callable[[], torch.Tensor], constants: list[torch.Tensor]) -> bool:
    """Whether a packer leaves the record of `fn` as it is; it then equals eager in every bit."""
    packer = LinearPacker(constants)
    graph = capture(fn, PersistentBuffers(), key="test", backend=partial(record, rewrite=packer))
    if packer.num_packed:
        return False
    assert compare_replay(graph) is None
    return True


@needs_fbgemm
def test_only_constants_are_packed() -> None:
    """A matrix that somebody else may write between replays is an input, whatever it looks like."""
    x, weight, buffer = torch.randn(3, 8), half_values(8, 8), half_values(8, 8, seed=1)
    assert untouched(lambda: x @ buffer.t(), [weight])
    assert untouched(lambda: linear(x, weight, buffer[0]), [weight])
    assert untouched(lambda: x @ (weight.t() * 1.0), [weight])
    assert not untouched(lambda: x @ weight.t(), [weight])
    assert not untouched(lambda: x @ weight, [weight])  # stored the other way round, as GPT-2 does


def num_ops(fn: Callable[[], torch.Tensor], packer: LinearPacker) -> int | None:
    return record(fn, packer)[0].num_ops


@needs_fbgemm
def test_layers_of_one_input_become_one_product() -> None:
    x, other = torch.randn(3, 8), torch.randn(3, 8)
    weights = [half_values(n, 8, seed=n) for n in (8, 4, 6)]
    biases = [torch.randn(n) for n in (8, 4, 6)]

    def three(*inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([linear(a, w) for a, w in zip(inputs, weights, strict=True)], dim=1)

    def biased() -> torch.Tensor:
        return torch.cat([linear(x, w, b) for w, b in zip(weights, biases, strict=True)], dim=1)

    def written_between() -> torch.Tensor:
        hidden = x * 1
        first = linear(hidden, weights[0])
        return torch.cat((first, linear(hidden.add_(1), weights[1]), linear(hidden, weights[2])), dim=1)

    packer = LinearPacker([*weights, *biases])
    assert num_ops(partial(three, x, x, x), packer) == 1 + 1
    assert num_ops(biased, packer) == 1 + 1
    assert num_ops(partial(three, x, x, other), packer) == 2 + 1
    assert num_ops(partial(three, x, other, x), packer) == 2 + 1
    assert num_ops(written_between, packer) == 1 + 1 + 1 + 1 + 1
    assert packer.num_packed == 3
    for fn in (partial(three, x, other, x), biased, written_between):
        program, expected = record(fn, packer)
        for _ in range(2):
            torch.testing.assert_close(program.run(), expected)


@needs_fbgemm
def test_layers_of_one_input_with_and_without_bias_stay_apart() -> None:
    x, weights, bias = torch.randn(3, 8), [half_values(8, 8, seed=n) for n in range(2)], torch.randn(8)
    packer = LinearPacker([*weights, bias])
    program, expected = record(lambda: linear(x, weights[0]) + linear(x, weights[1], bias), packer)
    assert program.num_ops == 2 + 1
    torch.testing.assert_close(program.run(), expected)


@needs_fbgemm
def test_a_weight_that_the_record_writes_is_not_packed() -> None:
    x, weight = torch.randn(3, 8), half_values(8, 8)

    def step() -> torch.Tensor:
        before = x @ weight
        weight.mul_(0.5)
        return before

    packer = LinearPacker([weight])
    program, first = record(step, packer)
    assert packer.num_packed == 0
    second = program.run()
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    torch.testing.assert_close(second, first * 0.5)


@needs_fbgemm
def test_a_weight_that_half_precision_cannot_hold_stays_as_it_is() -> None:
    x = torch.randn(3, 64)
    for weight in (torch.randn(8, 64), half_values(8, 64) * 1e6, half_values(8, 64) * 1e-9):
        assert untouched(partial(linear, x, weight), [weight])


def test_what_half_precision_holds() -> None:
    """bfloat16 numbers below 2**-17 lose digits there; a row may hold some, but not consist of them."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 576, generator=generator).bfloat16().float() * 2.0**-5
    assert fits_half(weight)
    assert fits_half(torch.zeros(2, 8))
    weight[3, ::50] *= 2.0**-15
    assert not torch.equal(weight, weight.half().float())
    assert fits_half(weight)
    weight[3] *= 2.0**-14
    assert not fits_half(weight)
    weight[3] = 1e30
    assert not fits_half(weight)
    weight[3] = torch.nan
    assert not fits_half(weight)
    assert not fits_half(weight.double())


# The engine.

PARAMS = [
    SamplingParams(max_tokens=30, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.8, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0.9, top_p=0.8, repetition_penalty=1.2, seed=2, ignore_eos=True),
]
PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9, 10, 11], [40, 41, 42, 43, 44]]


def half_model(architecture: str) -> nn.Module:
    """A tiny model whose weights half precision holds, as those of most checkpoints."""
    model = tiny_model(architecture)
    for parameter in model.parameters():
        parameter.copy_(parameter.half())
    return model


def serve(architecture: str, count: int = len(PROMPTS), **config: Any) -> tuple[list[list[int]], int]:
    """Texts of the first prompts, and how many regions Inductor compiled for them."""
    config = {"max_num_seqs": 3, "max_model_len": 64, "page_size": 8, **config}
    with Engine(half_model(architecture), config=EngineConfig(**config)) as engine:
        done = engine.generate(PROMPTS[:count], PARAMS[:count], progress=False)
        assert engine.config.user.enforce_eager or engine.stats().off_graph_decode_steps == 0
        return [c.token_ids for c in done], engine.stats().num_compiled_regions


@needs_fbgemm
@pytest.mark.parametrize(("architecture", "k"), [("llama", 0), ("llama", 1), ("llama", 4), ("qwen2", 3), ("gemma2", 2)])
def test_packed_graphs_give_the_text_of_eager(architecture: str, k: int) -> None:
    packed, _ = serve(architecture, num_speculative_tokens=k, pack_weights=True)
    eager, _ = serve(architecture, num_speculative_tokens=k, enforce_eager=True)
    ties, scorer = NearTies(), Scorer(half_model(architecture))
    for prompt, params, a, b in zip(PROMPTS, PARAMS, packed, eager, strict=True):
        assert_same_text(scorer, prompt, a, b, ties, params, params.seed or 0)
    ties.check()


@needs_fbgemm
@pytest.mark.skipif(not CAN_COMPILE, reason="needs g++ and the Python headers")
def test_what_lies_between_packed_products_is_compiled() -> None:
    one: dict[str, Any] = {"count": 1, "graph_rows": (3,), "num_speculative_tokens": 2}  # one graph: compiling is slow
    both, regions = serve("llama", **one, compile=True)
    plain, _ = serve("llama", **one, pack_weights=False)
    assert regions > 3
    ties, scorer = NearTies(), Scorer(half_model("llama"))
    for prompt, params, a, b in zip(PROMPTS[:1], PARAMS[:1], both, plain, strict=True):
        assert_same_text(scorer, prompt, a, b, ties, params, params.seed or 0)
    ties.check()


@needs_fbgemm
def test_padding_changes_no_row_of_a_packed_graph() -> None:
    config = EngineConfig(max_num_seqs=3, max_model_len=64, num_speculative_tokens=1, self_test=True, pack_weights=True)
    with Engine(half_model("llama"), config=config) as engine:
        store = engine._runner.decode_step.store
        assert all(store[key].program.source is None for key in store)


def test_without_fbgemm_weights_stay_plain_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("graphs.packed.has_fbgemm", lambda: False)
    with caplog.at_level(logging.INFO, logger="graphspec"):
        texts, _ = serve("llama", num_speculative_tokens=1)
    assert [r.message for r in caplog.records if "plain weights" in r.message] == [
        "linear layers read plain weights: pack_weights needs a torch with FBGEMM and a processor with AVX2: "
        "leave it out here"
    ]
    assert texts == serve("llama", num_speculative_tokens=1, enforce_eager=True)[0]
    with pytest.raises(ValueError, match="needs a torch with FBGEMM and a processor with AVX2"):
        Engine(half_model("llama"), config=EngineConfig(pack_weights=True))


def test_packing_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match="is for float32 on the CPU: leave it out"):
        Engine.from_pretrained("no-such-model", EngineConfig(pack_weights=True, dtype="bfloat16", device="cpu"))
    with pytest.raises(ValueError, match="is for float32 on the CPU: leave it out"):
        check_packing(torch.device("cuda"), None)
    with pytest.raises(ValueError, match="enforce_eager captures none: leave one of them out"):
        EngineConfig(pack_weights=True, enforce_eager=True)
