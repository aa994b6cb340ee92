"""Packed weights: the same products up to rounding, only of weights that lose nothing, and the same text."""

from __future__ import annotations

import logging
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import half_model
from same_text import NearTies, Scorer, assert_same_text
from torch import nn
from torch.nn.functional import linear

from graphs import PersistentBuffers, capture, compare_replay, record
from graphspec import Engine, EngineConfig, SamplingParams
from graphspec.models.packed_linears import (
    LinearLayer,
    PackedLinears,
    SiblingFinder,
    check_packing,
    fits_half,
    has_fbgemm,
)

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


def pack(*layers: tuple[torch.Tensor, torch.Tensor | None]) -> PackedLinears:
    return PackedLinears([tuple(LinearLayer(*layer) for layer in layers)])


@needs_fbgemm
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 16, 33])
def test_a_packed_product_is_the_plain_one_up_to_rounding(biased: bool, rows: int) -> None:
    x, weight = torch.randn(rows, 2, 37), half_values(50, 37)
    bias = torch.randn(50) if biased else None
    with pack((weight, bias)) as packed:
        out = linear(x, weight, bias)
        by_name = linear(x, weight=weight, bias=bias)
    assert (len(packed.weights), packed.num_refused) == (1, 0)
    assert out.shape == (rows, 2, 50)
    assert torch.equal(out, by_name)
    assert_rounding(out, x, weight, bias)


@needs_fbgemm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_packed_product_in_half_the_width_is_rounded_once(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 64, dtype=dtype), torch.randn(48, 64, dtype=dtype)
    with pack((weight, None)):
        out = linear(x, weight)
    assert out.dtype == dtype
    exact = linear(x.double(), weight.double())
    terms = linear(x.double().abs(), weight.double().abs())
    assert ((out.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps + terms * 65 * 2.0**-24).all()


class Tower(nn.Module):
    """Siblings of one input, a layer that runs twice, a tied one, and one whose weight is made on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 16)
        self.wide, self.narrow = nn.Linear(16, 12, bias=False), nn.Linear(16, 4, bias=False)
        self.biased, self.twice = nn.Linear(16, 16), nn.Linear(16, 16)
        for seed, parameter in enumerate(self.parameters()):
            parameter.requires_grad_(False).copy_(half_values(*parameter.shape, seed=seed))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        both = torch.cat((self.wide(x), self.narrow(x)), dim=-1) + self.biased(x)
        x = self.twice(self.twice(both.tanh()))
        x = linear(x, self.wide.weight.t() @ self.wide.weight)
        written = linear(x, self.wide.weight)
        product: torch.Tensor = linear(x.mul_(0.5), self.embed.weight)
        return product.sum(-1) + written.sum(-1)


def packed_tower() -> tuple[Tower, PackedLinears, torch.Tensor]:
    tower, ids = Tower(), torch.tensor([[1, 5, 2]])
    with torch.no_grad(), SiblingFinder() as finder:
        tower(ids)
    return tower, PackedLinears(finder.siblings(tower.parameters())), ids


def test_layers_of_one_input_are_siblings() -> None:
    tower, ids = Tower(), torch.tensor([[1, 5, 2]])
    with torch.no_grad(), SiblingFinder() as finder:
        tower(ids)
    names = {id(parameter): name for name, parameter in tower.named_parameters()}
    found = {tuple(names[id(layer.weight)] for layer in group) for group in finder.siblings(tower.parameters())}
    # "wide" runs twice, so it stands alone, and with it the layer that shares its input once.
    assert found == {("wide.weight",), ("narrow.weight",), ("biased.weight",), ("twice.weight",), ("embed.weight",)}
    a, b, c = (torch.randn(4, 16) for _ in range(3))
    x, other = torch.randn(3, 16), torch.randn(3, 16)
    with SiblingFinder() as finder:
        linear(x, a)
        linear(other, c)
        linear(x, b)
        linear(x.add_(1), torch.randn(4, 16))
    assert [len(group) for group in finder.siblings([a, b, c])] == [2, 1]


@needs_fbgemm
def test_a_forward_under_packs_is_the_plain_one_up_to_rounding_and_its_record_has_the_same_bits() -> None:
    tower, packed, ids = packed_tower()
    assert (len(packed.weights), packed.num_refused) == (5, 0)

    def step() -> torch.Tensor:
        with packed:
            return tower.forward(ids)

    with torch.no_grad():
        plain = tower(ids)
        graph = capture(step, PersistentBuffers(), key="test", backend=record)
        torch.testing.assert_close(step(), plain, rtol=1e-4, atol=1e-2)  # numbers in the hundreds
    assert compare_replay(graph) is None
    ops = [node.name for node in graph.program.nodes]  # type: ignore[attr-defined]
    assert ops.count("quantized::linear_dynamic_fp16") == 7
    assert ops.count("mm") == 1 + 1  # the weight that is made on the way, and the product with it


@needs_fbgemm
def test_an_input_that_is_written_between_siblings_is_read_again() -> None:
    x, a, b = torch.randn(3, 8), half_values(8, 8), half_values(4, 8, seed=1)
    with pack((a, None), (b, None)):
        first = linear(x, a)
        second = linear(x.mul_(2), b)
        third = linear(x, a)
    torch.testing.assert_close(first * 2, third)
    torch.testing.assert_close(second, x @ b.t())


@needs_fbgemm
def test_what_was_not_packed_is_plain() -> None:
    x, weight, bias = torch.randn(3, 8), half_values(8, 8), torch.randn(8)
    with pack((weight, bias), (half_values(4, 8), torch.randn(4))) as packed:
        assert len(packed.weights) == 2
        assert torch.equal(linear(x, weight), x @ weight.t())  # without its bias
        assert torch.equal(linear(x, weight.clone(), bias), torch.addmm(bias, x, weight.t()))
        assert torch.equal(linear(x, weight, bias.clone()), torch.addmm(bias, x, weight.t()))


@needs_fbgemm
def test_a_weight_that_half_precision_cannot_hold_stays_as_it_is() -> None:
    x, fits = torch.randn(3, 64), half_values(8, 64)
    for weight in (torch.randn(8, 64), half_values(8, 64) * 1e6, half_values(8, 64) * 1e-9):
        with pack((weight, None), (fits, None)) as packed:
            assert torch.equal(linear(x, weight), x @ weight.t())
            torch.testing.assert_close(linear(x, fits), x @ fits.t())
        assert (len(packed.weights), packed.num_refused) == (1, 1)


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


def serve(architecture: str, count: int = len(PROMPTS), **config: Any) -> tuple[list[list[int]], int]:
    """Texts of the first prompts, and how many regions Inductor compiled for them."""
    config = {"max_num_seqs": 3, "max_model_len": 64, "page_size": 8, **config}
    with Engine(half_model(architecture), config=EngineConfig(**config)) as engine:
        done = engine.generate(PROMPTS[:count], PARAMS[:count], progress=False)
        assert engine.config.user.enforce_eager or engine.stats().off_graph_decode_steps == 0
        return [c.token_ids for c in done], engine.stats().num_compiled_regions


@needs_fbgemm
@pytest.mark.parametrize(("architecture", "k"), [("llama", 0), ("llama", 1), ("llama", 4), ("qwen2", 3), ("gemma2", 2)])
def test_packs_give_the_text_of_plain_weights_and_graphs_that_of_eager(architecture: str, k: int) -> None:
    packed, _ = serve(architecture, num_speculative_tokens=k, pack_weights=True)
    eager, _ = serve(architecture, num_speculative_tokens=k, pack_weights=True, enforce_eager=True)
    assert packed == eager
    plain, _ = serve(architecture, num_speculative_tokens=k, pack_weights=False)
    ties, scorer = NearTies(), Scorer(half_model(architecture))
    for prompt, params, a, b in zip(PROMPTS, PARAMS, packed, plain, strict=True):
        assert_same_text(scorer, prompt, a, b, ties, params, params.seed or 0)
    ties.check()


@needs_fbgemm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_linear_layer_of_prefill_decode_and_draft_reads_packs(dtype: torch.dtype) -> None:
    """Packs do not follow their weights, so what still reads those would not survive that they are wiped."""
    config = EngineConfig(max_num_seqs=3, max_model_len=64, num_speculative_tokens=2)
    texts = []
    for wiped in (False, True):
        target, draft = (half_model("llama").to(dtype) for _ in range(2))
        with Engine(target, config=config, draft_model=draft) as engine:
            for module in (m for model in (target, draft) for m in model.modules() if wiped):
                if isinstance(module, nn.Linear):
                    assert module.weight is not target.get_input_embeddings().weight  # type: ignore[operator]
                    module.weight.fill_(torch.nan)
            texts.append([c.token_ids for c in engine.generate(PROMPTS, PARAMS, progress=False)])
            assert engine.stats().draft_acceptance_rate > 0.5
    assert texts[0] == texts[1]


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
        assert all(store[key].program.source is not None for key in store)  # so replays were compared with eager


def test_without_fbgemm_weights_stay_plain_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("graphspec.models.packed_linears.has_fbgemm", lambda: False)
    with caplog.at_level(logging.INFO, logger="graphspec"):
        texts, _ = serve("llama", num_speculative_tokens=1)
    assert [r.message for r in caplog.records if "plain weights" in r.message] == [
        "linear layers read plain weights: pack_weights needs a torch with FBGEMM and a processor with AVX2: "
        "leave it out here"
    ]
    assert texts == serve("llama", num_speculative_tokens=1, enforce_eager=True)[0]
    with pytest.raises(ValueError, match="needs a torch with FBGEMM and a processor with AVX2"):
        Engine(half_model("llama"), config=EngineConfig(pack_weights=True))


def test_packing_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphspec.models.packed_linears.has_fbgemm", lambda: False)
    with pytest.raises(ValueError, match="needs a torch with FBGEMM"):
        Engine.from_pretrained("no-such-model", EngineConfig(pack_weights=True, device="cpu"))
    with pytest.raises(ValueError, match="pack_weights is for the CPU: leave it out"):
        check_packing(torch.device("cuda"))
