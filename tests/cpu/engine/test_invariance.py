"""The text of a request depends on prompt, parameters and seed only: not on k, drafter, depth, batch or preemption."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import VOCAB, tiny_model
from same_text import NearTies, Scorer, assert_same_text
from torch import nn

from graphspec import Completion, Engine, EngineConfig, EngineStats, SamplingParams
from graphspec.drafting import DraftInputs, Drafts, HistoryDrafter
from graphspec.records.outputs import TokenLogprobs

EOS = 2
GREEDY = SamplingParams(max_tokens=48)
PARAMS = [
    GREEDY,
    SamplingParams(max_tokens=48, temperature=0.8, seed=1),
    SamplingParams(max_tokens=48, temperature=1.3, top_k=20, seed=2),
    SamplingParams(max_tokens=48, temperature=0.8, top_p=0.9, seed=3),
    SamplingParams(max_tokens=48, temperature=0.8, top_k=40, top_p=0.8, min_p=0.02, seed=2**63 + 5),
    SamplingParams(max_tokens=48, temperature=1.0, min_p=0.1, seed=5, ignore_eos=True),
]


def prompts(count: int) -> list[list[int]]:
    """Random prompts with a repeated part, so that n-grams match."""
    rng = random.Random(count)
    parts = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 12))] for _ in range(count)]
    return [part * rng.randint(1, 3) for part in parts]


def draft_model(name: str) -> nn.Module | None:
    """A draft model that agrees with the model ("equal"), one of other weights and size ("other"), or none."""
    return tiny_model("llama" if name == "equal" else "qwen3") if name else None


def run(
    every_prompt: list[list[int]], params: list[SamplingParams], *, draft: str = "", **config: Any
) -> tuple[list[Completion], EngineStats]:
    config = {"max_num_seqs": 8, "page_size": 8, "max_model_len": 160, "max_prefill_tokens": 32, **config}
    with Engine(tiny_model(), config=EngineConfig(**config), draft_model=draft_model(draft)) as engine:
        done = engine.generate(every_prompt, params, progress=False)
        return done, engine.stats()


@pytest.fixture(scope="module")
def scorer(tiny_llama: torch.nn.Module) -> Scorer:
    return Scorer(tiny_llama)


@pytest.fixture(scope="module")
def baseline() -> list[Completion]:
    """k = 0, depth 0, one request at a time: the plainest engine."""
    return [
        run([prompt], [PARAMS[i % len(PARAMS)]], num_speculative_tokens=0, depth=0, max_num_seqs=1)[0][0]
        for i, prompt in enumerate(prompts(12))
    ]


VARIANTS: list[dict[str, Any]] = [
    {"num_speculative_tokens": 0, "depth": 1},
    {"num_speculative_tokens": 0, "depth": 3, "max_num_seqs": 3},
    {"num_speculative_tokens": 1, "depth": 0},
    {"num_speculative_tokens": 1, "depth": 2, "drafter": "forced"},
    {"num_speculative_tokens": 3, "depth": 0, "max_prefill_tokens": 5},
    {"num_speculative_tokens": 3, "depth": 1, "max_num_seqs": 1},
    {"num_speculative_tokens": 4, "depth": 2},
    {"num_speculative_tokens": 5, "depth": 4, "max_num_seqs": 5},
    {"num_speculative_tokens": 7, "depth": 1, "max_num_seqs": 12},
    {"num_speculative_tokens": 7, "depth": 3, "drafter": "forced"},
    {"num_speculative_tokens": 4, "depth": 2, "num_pages": 24},  # preemption
    {"num_speculative_tokens": 7, "depth": 2, "num_pages": 24, "max_prefill_tokens": 5},  # and chunked prefill
    {"num_speculative_tokens": 1, "depth": 3, "draft": "equal"},
    {"num_speculative_tokens": 4, "depth": 1, "draft": "other", "max_prefill_tokens": 5},
    {"num_speculative_tokens": 7, "depth": 2, "draft": "equal", "num_pages": 26},  # preemption
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(f"{x}" for x in v.values()))
def test_every_variant_gives_the_text_of_the_plainest_engine(
    variant: dict[str, Any], baseline: list[Completion], scorer: Scorer
) -> None:
    params = [PARAMS[i % len(PARAMS)] for i in range(12)]
    done, stats = run(prompts(12), params, **variant)
    assert (stats.num_preemptions > 0) == ("num_pages" in variant)
    ties = NearTies()
    for prompt, own, a, b in zip(prompts(12), params, baseline, done, strict=True):
        assert_same_text(scorer, prompt, a.token_ids, b.token_ids, ties, own, own.seed or 0)
        if a.token_ids == b.token_ids:
            assert (a.finish_reason, a.usage) == (b.finish_reason, b.usage)
    ties.check()


def mixture(rng: random.Random, number: int) -> SamplingParams:
    """Any combination of everything that has a say in sampling. Rare rules are chosen so that they matter here."""
    temperature = rng.choice((0.0, 0.7, 1.0, 1.3))
    likely = [rng.randrange(3, VOCAB) for _ in range(40)]
    return SamplingParams(
        n=rng.choice((1, 1, 1, 2)) if temperature else 1,
        max_tokens=rng.choice((10, 32)),
        temperature=temperature,
        top_k=rng.choice((0, 0, 4, 40, 100)),
        top_p=rng.choice((1.0, 1.0, 0.95, 0.6)),
        min_p=rng.choice((0.0, 0.0, 0.05)),
        repetition_penalty=rng.choice((1.0, 1.0, 0.9, 1.3)),
        presence_penalty=rng.choice((0.0, 0.0, 0.6)),
        frequency_penalty=rng.choice((0.0, 0.0, -0.3, 0.5)),
        logit_bias=rng.choice((None, None, dict.fromkeys(likely[:3], 2.5))),
        allowed_token_ids=rng.choice((None, None, None, likely)),
        bad_words_ids=rng.choice(((), (), [likely[:1], *([a, b] for a in likely for b in likely[:3])])),
        stop_token_ids=rng.choice(((), likely[:8])),
        min_tokens=rng.choice((0, 0, 9)),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice((None, 0, 3)),
        prompt_logprobs=rng.choice((None, None, 2)),
        speculation=rng.random() < 0.8,
        seed=number << 40 | number,
    )


def expand(every_prompt: list[list[int]], params: list[SamplingParams]) -> Iterator[tuple[list[int], SamplingParams]]:
    """Prompt and parameters of every completion, in the order in which they come back."""
    return ((p, own) for p, own in zip(every_prompt, params, strict=True) for _ in range(own.n))


class Recital(HistoryDrafter):
    """Drafts the rest of texts it knows, with every fifth token wrong: acceptance is high whatever the parameters."""

    name = "recital"

    def __init__(self, texts: list[list[int]]) -> None:
        self._texts = torch.tensor([(text + [0] * 96)[:96] for text in texts])

    def propose(self, inputs: DraftInputs, num_draft: int) -> Drafts:
        lengths = inputs.newest + 1
        beyond = torch.arange(96) >= lengths.unsqueeze(1)
        same = ((inputs.history[:, None, :96] == self._texts) | beyond.unsqueeze(1)).all(-1)  # [R, texts]
        which = same.to(torch.int64).argmax(1)
        places = lengths.unsqueeze(1) + torch.arange(num_draft)
        drafts = self._texts.index_select(0, which).gather(1, places.clamp(max=95))
        drafts = torch.where((places + which.unsqueeze(1)) % 5 == 0, (drafts + 1) % VOCAB, drafts)
        return Drafts(drafts, torch.full_like(lengths, num_draft))


RECITING: list[dict[str, Any]] = [
    {"num_speculative_tokens": 1, "depth": 1, "max_num_seqs": 2},
    {"num_speculative_tokens": 4, "depth": 2, "num_pages": 14},  # preemption
    {"num_speculative_tokens": 7, "depth": 3, "max_num_seqs": 12, "max_prefill_tokens": 5},
]
MIXED_VARIANTS: list[dict[str, Any]] = [
    {"num_speculative_tokens": 0, "depth": 3},
    {"num_speculative_tokens": 2, "depth": 0, "drafter": "forced", "max_prefill_tokens": 9},
    {"num_speculative_tokens": 5, "depth": 1},
    {"num_speculative_tokens": 3, "depth": 2, "draft": "equal"},
    {"num_speculative_tokens": 4, "depth": 1, "draft": "other", "draft_shares_noise": False, "max_prefill_tokens": 9},
]


def test_random_mixtures_of_all_parameters_give_the_text_of_the_plainest_engine(
    scorer: Scorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts, log-probabilities and finish reasons; k, depth, drafter, batch and chunks vary between engines, the order
    of requests, and with it their neighbours, within one; from the second load on prompts are in the prefix cache."""
    rng, ties = random.Random(6), NearTies()
    every_prompt = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 8))] * rng.randint(1, 4) for _ in range(14)]
    params = [mixture(rng, number) for number in range(14)]
    common: dict[str, Any] = {"max_num_seqs": 8, "page_size": 8, "max_model_len": 96, "num_pages": 200}
    with ExitStack() as stack:

        def engine(draft: str = "", **config: Any) -> Engine:
            made = Engine(tiny_model(), config=EngineConfig(**{**common, **config}), draft_model=draft_model(draft))
            return stack.enter_context(made)

        plainest = engine(num_speculative_tokens=0, depth=0, max_num_seqs=1)
        expected = plainest.generate(every_prompt, params, progress=False)
        by_seed = {(c.seed, c.index): c for c in expected}
        recital = Recital([p + c.token_ids for (p, _), c in zip(expand(every_prompt, params), expected, strict=True)])
        with monkeypatch.context() as patch:
            patch.setattr("graphspec.execution.runner.create_drafter", lambda *_: recital)
            reciting = [engine(**variant) for variant in RECITING]
        engines = reciting + [engine(**variant) for variant in MIXED_VARIANTS]
        for _, one in itertools.product(range(2), engines):
            order = rng.sample(range(14), 14)
            some_prompts, some_params = [every_prompt[i] for i in order], [params[i] for i in order]
            done = one.generate(some_prompts, some_params, progress=False)
            for (prompt, own), found in zip(expand(some_prompts, some_params), done, strict=True):
                assert_same_completion(scorer, prompt, own, by_seed[found.seed, found.index], found, ties)
        stats = [one.stats() for one in engines]
        assert all(s.off_graph_decode_steps == 0 and s.prefix_cache_hit_rate > 0.0 for s in stats)
        assert [s.num_preemptions > 0 for s in stats] == ["num_pages" in v for v in RECITING + MIXED_VARIANTS]
        assert min(s.mean_acceptance_length for s in stats[: len(RECITING)]) > 1.5
    assert {c.finish_reason for c in expected} == {"length", "stop"}
    ties.check()


def assert_same_completion(
    scorer: Scorer, prompt: list[int], params: SamplingParams, a: Completion, b: Completion, ties: NearTies
) -> None:
    assert_same_text(scorer, prompt, a.token_ids, b.token_ids, ties, params, a.seed, a.index)
    assert_same_logprobs(a.prompt_logprobs, b.prompt_logprobs)
    if a.token_ids == b.token_ids:
        assert (a.finish_reason, a.usage) == (b.finish_reason, b.usage)
        assert_same_logprobs(a.logprobs, b.logprobs)


def assert_same_logprobs(a: Sequence[TokenLogprobs | None] | None, b: Sequence[TokenLogprobs | None] | None) -> None:
    """Equal up to rounding; alternatives that are as likely may stand in for each other."""
    assert (a is None) == (b is None)
    for x, y in zip(a or (), b or (), strict=True):
        ours, theirs = (sorted(e.logprob for e in (z or {}).values()) for z in (x, y))
        assert ours == pytest.approx(theirs, abs=1e-4)
        assert next(iter(x or (0,))) == next(iter(y or (0,)))


BASE = SamplingParams(max_tokens=40, temperature=1.0, seed=9, ignore_eos=True, logit_bias={EOS: 2.0})


def test_every_parameter_matters() -> None:
    """Each of them changes a text that is drawn without it: so the mixtures above test something."""
    changes: list[dict[str, Any]] = [
        {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.6}, {"min_p": 0.2}, {"repetition_penalty": 1.3},
        {"presence_penalty": 0.6}, {"frequency_penalty": 1.5}, {"logit_bias": {20: 2.5, 21: 2.5}}, {"seed": 10},
        {"allowed_token_ids": range(100)}, {"bad_words_ids": [[t] for t in range(3, 40)]}, {"ignore_eos": False},
        {"stop_token_ids": range(3, 20)}, {"stop_token_ids": range(3, 20), "min_tokens": 30},
    ]  # fmt: skip
    every = prompts(2)
    with Engine(tiny_model(), config=EngineConfig(max_model_len=96, enforce_eager=True)) as engine:
        texts = [
            [c.token_ids for c in engine.generate(every, replace(BASE, **change), progress=False)]
            for change in [{}, *changes]
        ]
    assert all(a != b for a, b in itertools.combinations(texts, 2))


@pytest.mark.parametrize("k", [1, 4])
def test_acceptance_agrees_exactly_between_depths(k: int) -> None:
    """Same launches, later answers: all counters but the waste are equal."""
    stats = [run(prompts(6), [GREEDY] * 6, num_speculative_tokens=k, depth=depth)[1] for depth in (0, 1, 3)]
    for other in stats[1:]:
        for name in ("num_drafts", "num_accepted_tokens", "num_delivered_draft_tokens", "acceptance_rates"):
            assert getattr(other, name) == getattr(stats[0], name)
    assert stats[0].wasted_positions == 0
    assert stats[0].num_accepted_tokens > 20  # or nothing was tested


def test_forced_acceptance_accepts_exactly_that_many_and_is_marked() -> None:
    """Every step but those that max_tokens ends emits exactly 1 + 2 tokens; the text is not the model's and says so."""
    params = SamplingParams(max_tokens=31, ignore_eos=True)
    done, stats = run(prompts(3), [params] * 3, num_speculative_tokens=4, drafter="forced", forced_num_accepted=2)
    assert all(c.synthetic for c in done)
    assert stats.mean_acceptance_length == 3.0
    assert stats.acceptance_rates == [1.0, 1.0, 0.0, 0.0]
    assert stats.num_drafts == 3 * 10
    honest, _ = run(prompts(3), [params] * 3, num_speculative_tokens=4, drafter="forced", forced_num_accepted=0)
    plain, _ = run(prompts(3), [params] * 3, num_speculative_tokens=4)
    assert not any(c.synthetic for c in honest)
    assert [c.token_ids for c in honest] == [c.token_ids for c in plain]


def test_a_request_may_go_without_speculation_inside_a_speculating_batch() -> None:
    """No drafts are counted for it, its rows stay 1 + k wide, its text is the same (scenario 12)."""
    plain, _ = run(prompts(4), [GREEDY] * 4, num_speculative_tokens=0)
    without = SamplingParams(max_tokens=48, speculation=False)
    mixed, stats = run(prompts(4), [GREEDY, without, GREEDY, without], num_speculative_tokens=3)
    assert [c.token_ids for c in mixed] == [c.token_ids for c in plain]
    _, alone = run(prompts(4)[::2], [GREEDY] * 2, num_speculative_tokens=3)
    assert (stats.num_drafts, stats.num_accepted_tokens) == (alone.num_drafts, alone.num_accepted_tokens)
    _, off = run(prompts(4), [without] * 4, num_speculative_tokens=3)
    assert (off.num_drafts, off.num_accepted_tokens) == (0, 0)


def test_a_cached_prefix_costs_no_acceptance() -> None:
    """The drafter sees the whole history of a request, the cached part too (bug class F 52)."""
    every = [prompts(1)[0] * 4] * 2
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with Engine(tiny_model(), config=EngineConfig(page_size=4, num_speculative_tokens=4)) as engine:
        accepted = []
        for prompt in every:
            before = engine.stats().num_accepted_tokens
            engine.generate([prompt], params, progress=False)
            accepted.append(engine.stats().num_accepted_tokens - before)
        assert engine.stats().prefix_cache_hit_rate > 0.3
    assert accepted[0] == accepted[1] > 0


def test_ngram_drafts_are_accepted_on_repetitive_text() -> None:
    """A drafter that saw tokens one step late would accept almost nothing here."""
    _, stats = run(prompts(6), [GREEDY] * 6, num_speculative_tokens=3)
    assert stats.mean_acceptance_length > 1.3


def test_a_request_without_seed_reports_the_one_that_reproduces_it() -> None:
    params = SamplingParams(max_tokens=32, temperature=1.0)
    first, _ = run(prompts(4), [params] * 4)
    assert len({c.seed for c in first}) == 4
    again = [SamplingParams(max_tokens=32, temperature=1.0, seed=c.seed) for c in first]
    second, _ = run(prompts(4), again, num_speculative_tokens=2, depth=0)
    assert [c.token_ids for c in second] == [c.token_ids for c in first]


def test_the_limit_of_the_model_ends_a_text_at_every_k() -> None:
    """Running past max_model_len: the last tokens are right although drafts reach beyond it (scenario 38)."""
    texts = []
    for k in (0, 1, 3, 7, 10):
        params = SamplingParams(max_tokens=500, ignore_eos=True)
        done, _ = run(prompts(3), [params] * 3, num_speculative_tokens=k, max_model_len=61, page_size=8, depth=2)
        assert [c.finish_reason for c in done] == ["length"] * 3
        assert [c.usage.prompt_tokens + c.usage.completion_tokens for c in done] == [61] * 3
        texts.append([c.token_ids for c in done])
    assert texts.count(texts[0]) == 5
