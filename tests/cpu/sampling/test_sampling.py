"""Sampling is exact, keyed by seed and position only, and the same in every kind of graph."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from distributions import FILTERS, PLAIN, assert_chi_square, expected_probabilities, rows_of

from graphspec.records.sampling_params import SamplerNeeds, SamplingParams, sampler_kind
from graphspec.sampling.keyed_sampling import (
    BASES,
    SAMPLERS,
    draw,
    draw_in_blocks,
    gumbel,
    lowest_logit,
    position_keys,
    sample,
    token_words,
)
from graphspec.sampling.rows import MASK32, as_int32

SERVES = {
    SamplerNeeds.NOTHING: BASES,
    SamplerNeeds.NOISE: ("plain", "bounded", "sorted"),
    SamplerNeeds.TOP_K: ("bounded", "sorted"),
    SamplerNeeds.SORT: ("sorted",),
}


def keys_of(seeds: torch.Tensor, completion: int, positions: int, purpose: int) -> torch.Tensor:
    """Keys `[seeds, positions, 2]` of the first `positions` positions."""
    rows = rows_of([PLAIN], seeds, completion)
    return position_keys(rows.seed, rows.completion, torch.arange(positions).expand(len(seeds), -1), purpose)


def random_params(rng: random.Random) -> SamplingParams:
    temperature, top_k = rng.choice((0.0, 0.3, 1.0, 2.0)), rng.choice((0, 0, 1, 3, 20, 64, 65, 500))
    top_p, min_p = rng.choice((1.0, 1.0, 0.95, 0.5, 0.01)), rng.choice((0.0, 0.0, 0.02, 0.3, 1.0))
    return SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def test_every_kind_that_serves_a_row_gives_the_same_token() -> None:
    rng = random.Random(3)
    for trial, vocab in enumerate((5, 64, 65, 200, 1000) * 8):
        torch.manual_seed(trial)
        params = [random_params(rng) for _ in range(24)]
        rows = rows_of(params, torch.randint(-(2**62), 2**62, (24,)))
        logits, positions = torch.randn(24, 3, vocab) * 3, torch.randint(0, 5000, (24, 3))
        tokens = {kind: sample(logits, positions, rows, kind) for kind in BASES}
        for row, p in enumerate(params):
            assert all(torch.equal(tokens[kind][row], tokens["sorted"][row]) for kind in SERVES[p.needs]), p
        alone = sample(logits[:1, 1:2], positions[:1, 1:2], rows.rows(torch.tensor([0])), "sorted")
        assert alone == tokens["sorted"][0, 1], "a token depends on its batch or on its neighbours"


def test_the_kind_of_a_batch_serves_every_row_and_is_the_cheapest() -> None:
    draws, kinds = SamplerNeeds.NOISE | SamplerNeeds.TOP_K | SamplerNeeds.SORT, set()
    for needs in map(SamplerNeeds, range(32)):
        base, *extras = sampler_kind(needs).split("+")
        serves = [b for b in BASES if all(b in SERVES[n] for n in draws & needs)]
        wanted = [e for e in (SamplerNeeds.PROCESSORS, SamplerNeeds.LOGPROBS) if e & needs]
        assert base == next(b for b in serves if not wanted or b in ("bounded", "sorted"))
        assert extras == [str(e.name).lower() for e in wanted]
        kinds.add(sampler_kind(needs))
    assert kinds == set(SAMPLERS)
    assert sampler_kind(replace(FILTERS[-1], temperature=0.0).needs) == "greedy"
    assert sampler_kind(PLAIN.needs | replace(PLAIN, min_p=0.1).needs) == "plain"


@pytest.mark.parametrize(
    "extra",
    [
        {"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": -0.1}, {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [3]}, {"bad_words": ["x"]}, {"bad_words_ids": [[3]]}, {"min_tokens": 1},
        {"min_tokens": 1, "ignore_eos": True, "stop_token_ids": [3]}, {"logprobs": 0},
    ],
)  # fmt: skip
def test_only_batches_that_need_them_pay_for_processors_and_logprobs(extra: dict[str, Any]) -> None:
    wanted = SamplerNeeds.LOGPROBS if "logprobs" in extra else SamplerNeeds.PROCESSORS
    assert SamplingParams(**extra).needs == wanted
    assert SamplingParams(min_tokens=1, ignore_eos=True, prompt_logprobs=3).needs == SamplerNeeds.NOTHING


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("ties", [2, 60])
def test_temperature_zero_is_the_first_largest_logit(kind: str, ties: int) -> None:
    rows = rows_of([SamplingParams(top_k=2, top_p=0.1, min_p=0.9)], torch.arange(20))
    torch.manual_seed(ties)
    tied = torch.rand(20, 2, 150).argsort(-1)[..., :ties]
    logits = torch.randn(20, 2, 150).scatter(-1, tied, 9.0)
    assert torch.equal(sample(logits, torch.zeros(20, 2, dtype=torch.int64), rows, kind), tied.amin(-1))


@pytest.mark.parametrize(("vocab", "top_p"), [(10, None), (300, None), (20_000, 1.0)])
def test_surviving_tokens_are_those_of_transformers(vocab: int, top_p: float | None) -> None:
    rng = random.Random(vocab)
    torch.manual_seed(vocab)
    for _ in range(100 if vocab < 1000 else 20):
        params = replace(random_params(rng), temperature=rng.uniform(0.5, 2.0), top_p=top_p or rng.uniform(0.01, 0.99))
        logits = torch.randn(4, 1, vocab) * 3
        expected = expected_probabilities(logits, params)
        for base in SERVES[params.needs]:
            lowest = lowest_logit(logits, rows_of([params], torch.arange(4)), base)
            assert torch.equal(logits >= lowest, expected > 0), params


@pytest.mark.parametrize(("params", "spread"), [(replace(PLAIN, top_k=64), 2.0), (SamplingParams(), 0.0)])
def test_ties_at_the_edge_of_the_bounded_candidates_change_no_token(params: SamplingParams, spread: float) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(400, 1, 2000) * spread).bfloat16()  # as a bfloat16 model gives them: many are equal
    rows, positions = rows_of([params], torch.arange(400)), torch.zeros(400, 1, dtype=torch.int64)
    assert torch.equal(sample(logits, positions, rows, "bounded"), sample(logits, positions, rows, "sorted"))


@pytest.mark.parametrize("params", FILTERS, ids=range(len(FILTERS)))
def test_draws_follow_the_filtered_softmax(params: SamplingParams) -> None:
    """Over neighbouring seeds at one position, and over neighbouring positions of one seed."""
    torch.manual_seed(1)
    logits, many, one = torch.randn(1, 1, 12) * 1.5, torch.arange(30_000).view(1, -1), torch.tensor([2**40 + 3])
    expected = expected_probabilities(logits, params)
    for kind in SERVES[params.needs]:
        rows = rows_of([params], many[0])
        assert_chi_square(sample(logits.expand(30_000, 1, 12), many.T * 0 + 9, rows, kind), expected)
        assert_chi_square(sample(logits.expand(1, 30_000, 12), many, rows_of([params], one), kind), expected)


def noise_cube() -> torch.Tensor:
    """Noise `[seeds, completions, positions, purposes, ids]` of neighbouring seeds (both words), completions,
    positions, purposes and ids."""
    seeds = torch.tensor([s + (high << 32) for high in range(4) for s in range(8)])
    of_purpose = [torch.stack([keys_of(seeds, c, 16, purpose) for c in range(4)], dim=1) for purpose in range(2)]
    return gumbel(torch.stack(of_purpose, dim=3).unsqueeze(-2), torch.arange(256, dtype=torch.int32))


MOVES = [
    (1, 0, 0, 0, 0), (8, 0, 0, 0, 0), (0, 1, 0, 0, 0), (0, 0, 1, 0, 0), (0, 0, 0, 1, 0), (0, 0, 0, 0, 1),
    (1, 0, 1, 0, 0), (1, 1, 0, 0, 0), (8, 1, 0, 0, 0), (0, 1, 1, 0, 0), (0, 0, 1, 0, 1),
]  # fmt: skip


def test_noise_is_uniform_and_independent_of_its_neighbours() -> None:
    uniform = -torch.expm1(-torch.exp(-noise_cube().double()))
    assert 0.0 < float(uniform.min()) < float(uniform.max()) < 1.0
    assert_chi_square((uniform * 256).long(), torch.full((256,), 1 / 256))
    for moved in MOVES:
        here = uniform[tuple(slice(d, None) for d in moved)]
        there = uniform[tuple(slice(0, n - d) for d, n in zip(moved, uniform.shape, strict=True))]
        z = float(((here - 0.5) * (there - 0.5)).mean()) * 12 * math.sqrt(here.numel())
        assert abs(z) < 4.5, f"noise moved by {moved} correlates: {z:.1f} standard deviations"
        assert_chi_square((here * 8).long() * 8 + (there * 8).long(), torch.full((64,), 1 / 64))


def test_no_two_streams_are_shifted_copies_of_each_other() -> None:
    """Two neighbouring values never occur in this order twice, along the vocabulary or along positions."""
    bits = noise_cube()[:, :2].contiguous().view(torch.int32).to(torch.int64)
    for stream in (bits, bits.transpose(2, 4)):
        pairs = (stream[..., :-1] << 32) + (stream[..., 1:] & MASK32)
        assert int((pairs.flatten().sort().values.diff() == 0).sum()) == 0


def test_a_million_seeds_completions_and_positions_share_no_key() -> None:
    """A key that were worth 32 bits would collide about 128 times."""
    seeds = torch.cat((torch.arange(64), torch.arange(64) << 32))[1:]  # seed 0 is in both halves
    keys = torch.stack([keys_of(seeds, completion, 1024, 0) for completion in range(8)]).to(torch.int64)
    whole = (keys[..., 0] << 32) + (keys[..., 1] & MASK32)
    assert int((whole.flatten().sort().values.diff() == 0).sum()) == 0


def test_keys_are_the_documented_integers() -> None:
    """The same on every device: computed here with Python's integers, from the formula of the docstring."""
    for seed, index, position, purpose in ((0, 0, 0, 0), (7, 3, 12, 1), (2**64 - 1, 100, 5000, 0), (2**40, 1, 9, 2)):
        low, high = seed & MASK32 ^ mix(0x9E3779B9 * index), (seed >> 32) + mix(0x85EBCA6B * index)
        where = mix(position + 0x632BE5AB * (purpose + 1))
        a, b = mix(low ^ where), mix(high + where + 0x7F4A7C15)
        expected = [as_int32(mix(a + b)), as_int32(mix(a ^ mix(b)))]
        words = torch.tensor([[as_int32(seed), as_int32(seed >> 32)]], dtype=torch.int32)
        found = position_keys(words, torch.tensor([index], dtype=torch.int32), torch.tensor([[position]]), purpose)
        assert found[0, 0].tolist() == expected


def mix(x: int, *, undo: bool = False) -> int:
    """MurmurHash3's finaliser on Python integers, and its inverse."""
    x &= MASK32
    factors = (pow(0xC2B2AE35, -1, 2**32), pow(0x85EBCA6B, -1, 2**32)) if undo else (0x85EBCA6B, 0xC2B2AE35)
    x = (x ^ x >> 16) * factors[0] & MASK32
    x = (x ^ x >> 13 ^ (x >> 26 if undo else 0)) * factors[1] & MASK32
    return x ^ x >> 16


@pytest.mark.parametrize("word", [0, 1, 0x3FFFFFFF, 0x7FFFFFFE, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
def test_noise_is_finite_and_exact_for_extreme_hash_words(word: int) -> None:
    token, low = 77, 0x12345678
    high = mix(word, undo=True) - (mix(token * 0x9E3779B9) ^ low)  # the key under which the token's hash is `word`
    key = torch.tensor([low, as_int32(high)], dtype=torch.int32)
    noise = float(gumbel(key, torch.tensor(token, dtype=torch.int32)))
    uniform = ((word & 0x7FFFFFFF) + 0.5) / 2**31
    assert noise == pytest.approx(-math.log(-math.log1p(-min(uniform, 1 - 2**-24))), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("numbers", [1, 64, 150, 10_000])
def test_drawing_in_blocks_of_rows_is_drawing_at_once(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit, whatever the size of a block; an op that shows what it reads and writes."""
    monkeypatch.setattr("graphspec.sampling.keyed_sampling.BLOCK_NUMBERS", numbers)
    logits = 3 * torch.randn(3, 5, 50)
    keys = torch.randint(-(2**31), 2**31 - 1, (3, 5, 1, 2), dtype=torch.int32)
    temperature = torch.tensor([0.0, 0.7, 1.5]).view(3, 1, 1).expand(3, 5, 1)
    lowest = logits.topk(20, dim=-1).values[..., -1:]
    whole = draw(logits, token_words(logits), keys, temperature, lowest)
    assert torch.equal(draw_in_blocks(logits, keys, temperature, lowest), whole)
    torch.library.opcheck(draw_in_blocks, (logits, keys, temperature, lowest))
