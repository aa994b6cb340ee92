"""Sampling is exact, keyed by seed and position only, and the same in every kind of graph."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from transformers.generation import logits_process as hf

from graphspec.request import SamplerNeeds, SamplingParams, sampler_kind
from graphspec.sampling import SAMPLERS, _threshold, gumbel, position_keys, sample
from graphspec.state import MASK32, SamplingRows, as_int32
from graphspec.verify import verify

PLAIN = SamplingParams(temperature=0.8)
FILTERS = [
    PLAIN,
    SamplingParams(temperature=1.4, top_k=5),
    SamplingParams(temperature=1.0, top_p=0.7),
    SamplingParams(temperature=0.9, min_p=0.12),
    SamplingParams(temperature=1.2, top_k=7, top_p=0.9, min_p=0.05),
]
SERVES = {
    SamplerNeeds.NOTHING: SAMPLERS,
    SamplerNeeds.NOISE: ("plain", "sorted"),
    SamplerNeeds.TOP_K: ("bounded", "sorted"),
    SamplerNeeds.SORT: ("sorted",),
}


def rows_of(params: list[SamplingParams], seeds: torch.Tensor) -> SamplingRows:
    """One row per seed (int64); a single set of parameters serves them all."""
    params = params * (len(seeds) // len(params))
    fields = [torch.tensor([getattr(p, name) for p in params]) for name in SamplingRows._fields[:4]]
    return SamplingRows._make([*fields, torch.stack((seeds, seeds >> 32), dim=1).to(torch.int32)])


def assert_chi_square(outcomes: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Below 4.5 standard deviations (Wilson-Hilferty), and nothing impossible occurs."""
    expected = probabilities.flatten() * outcomes.numel()
    observed = outcomes.flatten().bincount(minlength=len(expected))
    assert not observed[expected == 0].any(), "an impossible outcome was drawn"
    likely, df = expected > 5, int((expected > 5).sum()) - 1
    chi = float(((observed - expected)[likely] ** 2 / expected[likely]).sum())
    z = ((chi / df) ** (1 / 3) - 1 + 2 / (9 * df)) / math.sqrt(2 / (9 * df))
    assert z < 4.5, f"chi-square {chi:.1f} for {df} degrees of freedom"


def expected_probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What transformers would draw from, for `logits` `[..., V]`."""
    scores = hf.TemperatureLogitsWarper(params.temperature)(None, logits.flatten(0, -2))
    scores = hf.TopKLogitsWarper(params.top_k)(None, scores) if params.top_k else scores
    scores = hf.TopPLogitsWarper(params.top_p)(None, scores) if params.top_p < 1 else scores
    scores = hf.MinPLogitsWarper(params.min_p)(None, scores) if params.min_p > 0 else scores
    return torch.as_tensor(scores).view_as(logits).softmax(-1)


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
        tokens = {kind: sample(logits, positions, rows, kind) for kind in SAMPLERS}
        for row, p in enumerate(params):
            assert all(torch.equal(tokens[kind][row], tokens["sorted"][row]) for kind in SERVES[p.needs]), p
        alone = sample(logits[:1, 1:2], positions[:1, 1:2], rows.rows(torch.tensor([0])), "sorted")
        assert alone == tokens["sorted"][0, 1], "a token depends on its batch or on its neighbours"


def test_the_kind_of_a_batch_serves_every_row_and_is_the_cheapest() -> None:
    for needs in range(8):
        assert sampler_kind(needs) == next(
            k for k in SAMPLERS if all(k in SERVES[n] for n in SamplerNeeds if n & needs)
        )
    assert sampler_kind(replace(FILTERS[-1], temperature=0.0).needs) == "greedy"
    assert sampler_kind(PLAIN.needs | replace(PLAIN, min_p=0.1).needs) == "plain"


@pytest.mark.parametrize("kind", SAMPLERS)
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
        scaled = torch.randn(4, 1, vocab) * 3 / params.temperature
        threshold = _threshold(scaled.sort(dim=-1, descending=True).values, rows_of([params], torch.arange(4)))
        expected = expected_probabilities(scaled, replace(params, temperature=1.0))
        assert torch.equal(scaled >= threshold, expected > 0), params


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
    """Noise `[seeds, positions, purposes, ids]` of neighbouring seeds (both words), positions, purposes and ids."""
    seeds = torch.tensor([s + (high << 32) for high in range(4) for s in range(8)])
    words, positions = rows_of([PLAIN], seeds).seed, torch.arange(16).expand(32, 16)
    keys = torch.stack([position_keys(words, positions, purpose) for purpose in range(2)], dim=2)
    return gumbel(keys.unsqueeze(-2), torch.arange(256, dtype=torch.int32))


def test_noise_is_uniform_and_independent_of_its_neighbours() -> None:
    uniform = -torch.expm1(-torch.exp(-noise_cube().double()))
    assert_chi_square((uniform * 256).long(), torch.full((256,), 1 / 256))
    for moved in ((1, 0, 0, 0), (8, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (1, 1, 0, 0), (0, 1, 0, 1)):
        here = uniform[tuple(slice(d, None) for d in moved)]
        there = uniform[tuple(slice(0, n - d) for d, n in zip(moved, uniform.shape, strict=True))]
        z = float(((here - 0.5) * (there - 0.5)).mean()) * 12 * math.sqrt(here.numel())
        assert abs(z) < 4.5, f"noise moved by {moved} correlates: {z:.1f} standard deviations"
        assert_chi_square((here * 8).long() * 8 + (there * 8).long(), torch.full((64,), 1 / 64))


def test_no_two_streams_are_shifted_copies_of_each_other() -> None:
    """Two neighbouring values never occur in this order twice, along the vocabulary or along positions."""
    bits = noise_cube().view(torch.int32).to(torch.int64)
    for stream in (bits, bits.transpose(1, 3)):
        pairs = (stream[..., :-1] << 32) + (stream[..., 1:] & MASK32)
        assert int((pairs.flatten().sort().values.diff() == 0).sum()) == 0


def test_a_million_seeds_and_positions_share_no_key() -> None:
    """A key that were worth 32 bits would collide about 128 times."""
    seeds = torch.cat((torch.arange(512), torch.arange(512) << 32))[1:]  # seed 0 is in both halves
    keys = position_keys(rows_of([PLAIN], seeds).seed, torch.arange(1024).expand(1023, 1024), 0).to(torch.int64)
    whole = (keys[..., 0] << 32) + (keys[..., 1] & MASK32)
    assert int((whole.flatten().sort().values.diff() == 0).sum()) == 0


def mix(x: int, *, undo: bool = False) -> int:
    """MurmurHash3's finaliser on Python integers, and its inverse."""
    factors = (pow(0xC2B2AE35, -1, 2**32), pow(0x85EBCA6B, -1, 2**32)) if undo else (0x85EBCA6B, 0xC2B2AE35)
    x = (x ^ x >> 16) * factors[0] & MASK32
    x = (x ^ x >> 13 ^ (x >> 26 if undo else 0)) * factors[1] & MASK32
    return x ^ x >> 16


@pytest.mark.parametrize("word", [0, 1, 0x3FFFFFFF, 0x7FFFFFFE, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
def test_noise_is_finite_and_exact_for_extreme_hash_words(word: int) -> None:
    token, low = 77, 0x12345678
    high = mix(word, undo=True) - mix(
        token * 0x9E3779B9 & MASK32 ^ low
    )  # the key under which the token's hash is `word`
    key = torch.tensor([low, as_int32(high)], dtype=torch.int32)
    noise = float(gumbel(key, torch.tensor(token, dtype=torch.int32)))
    uniform = ((word & 0x7FFFFFFF) + 0.5) / 2**31
    assert noise == pytest.approx(-math.log(-math.log1p(-min(uniform, 1 - 2**-24))), rel=1e-5, abs=1e-6)


def walk(table: torch.Tensor, params: SamplingParams, texts: int, length: int, k: int) -> torch.Tensor:
    """`texts` speculative texts `[texts, length]` of a model whose logits are `table[previous token]`."""
    out, done = torch.zeros(texts, 1 + length + k, dtype=torch.int64), torch.zeros(texts, 1, dtype=torch.int64)
    rows, kind = rows_of([params], torch.arange(texts)), sampler_kind(params.needs)
    while int(done.min()) < length:
        done = done.clamp(max=length - 1)  # a finished text repeats its last step
        newest = out.gather(1, done)
        drafts, places = torch.randint(0, len(table), (texts, k)), done + 1 + torch.arange(1 + k)
        samples = sample(table[torch.cat((newest, drafts), 1)], places, rows, kind)
        emitted, num_emitted, _ = verify(drafts, samples, torch.full((texts,), k))
        out.scatter_(1, places, emitted)
        done = done + num_emitted.unsqueeze(1)
    return out[:, 1 : 1 + length]


@pytest.mark.parametrize("params", FILTERS, ids=range(len(FILTERS)))
def test_speculation_changes_neither_the_text_nor_its_distribution(params: SamplingParams) -> None:
    """Random drafts, verified by keyed samples: equal seeds give the text of k = 0, and pairs of tokens follow the
    chain's exact joint distribution at the second, third and fourth position."""
    torch.manual_seed(4)
    table = torch.randn(6, 6) * 1.5
    plain = walk(table, params, 20_000, 4, k=0)
    assert all(torch.equal(walk(table, params, 20_000, 4, k), plain) for k in (1, 3))
    chain = expected_probabilities(table, params).double()
    marginal = chain[0]
    for at in range(1, 4):
        joint = marginal.unsqueeze(1) * chain
        assert_chi_square(plain[:, at - 1] * 6 + plain[:, at], joint)
        marginal = joint.sum(0)
