"""The n-gram pool that requests share: what it remembers, what it gives, and what it may never do."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import VOCAB, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from same_text import NearTies, Scorer, assert_same_text

from graphs import CaptureGuard, GraphKey, compare_replay, poison
from graphspec import Completion, Engine, EngineConfig, EngineStats, SamplingParams
from graphspec.drafting.pool import EMPTY, NgramPool
from graphspec.scheduling.page_pool import salt_word

SCRATCH = 9
CPU = torch.device("cpu")
Write = tuple[int, int, list[int], bool]  # slot, salt, n tokens and the one after them, whole


def write(pool: NgramPool, writes: list[Write]) -> None:
    slots, salts, tokens, whole = (list(column) for column in zip(*writes, strict=True))
    pool.write(torch.tensor(slots), torch.tensor(salts), torch.tensor(tokens), torch.tensor(whole))


def chain(pool: NgramPool, salt: int, newest: list[int], k: int) -> tuple[list[int], int]:
    drafts, num_valid = pool.chain(torch.tensor([salt]), torch.tensor([newest]), torch.tensor([True]), k)
    return drafts[0].tolist(), int(num_valid)


WRITES = st.lists(
    st.tuples(
        st.sampled_from([0, 1, SCRATCH]),
        st.sampled_from([0, -5, 2**40]),
        st.lists(st.integers(0, 2), min_size=3, max_size=3),
        st.booleans(),
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(WRITES, min_size=1, max_size=3), st.sampled_from([1, 2, 7, 1 << 12]), st.integers(1, 5))
def test_a_pool_is_a_dictionary_that_forgets(calls: list[list[Write]], num_entries: int, k: int) -> None:
    """Whatever collides, duplicates included: an entry is what was written last to it, or nothing is found."""
    pool = NgramPool(num_entries, 2, SCRATCH, CPU)
    held: dict[int, tuple[tuple[int, ...], int]] = {}  # entry -> key, token

    def place(key: tuple[int, ...]) -> int:
        return int(pool._place(torch.tensor([key[0]]), torch.tensor([key[1:]])))

    for writes in calls:
        write(pool, writes)
        for slot, salt, tokens, whole in writes:
            if whole and slot != SCRATCH:
                key = (salt, *tokens[:2])
                held[place(key)] = (key, tokens[2])
    assert set(pool.entries[-1].tolist()) == {EMPTY}
    assert int((pool.entries[:-1, -1] != EMPTY).sum()) == len(held)
    for salt in (0, -5, 2**40):
        for newest in ([0, 0], [0, 1], [2, 1]):
            text, expected = list(newest), 0
            while expected < k and (found := held.get(place(key := (salt, *text[-2:])))) and found[0] == key:
                text.append(found[1])
                expected += 1
            text += text[-1:] * (k - expected)
            assert chain(pool, salt, newest, k) == (text[2:], expected)


def test_entries_of_a_large_pool_seldom_collide() -> None:
    """All 3-grams of 40 tokens in a table of twice their number: as many places as random ones would take."""
    tokens = torch.cartesian_prod(*[torch.arange(40)] * 3)
    for num_entries in (1 << 17, 128_000):
        places = NgramPool(num_entries, 3, SCRATCH, CPU)._place(torch.full((64_000,), 12345), tokens)
        expected = num_entries * (1 - (1 - 1 / num_entries) ** 64_000)
        assert len(torch.unique(places)) > 0.98 * expected


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(2, 20))] for _ in range(count)]


GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
PARAMS = [
    GREEDY,
    SamplingParams(max_tokens=30, temperature=0.8, seed=1, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=1.2, top_p=0.9, seed=3, n=2),
]


def engine_of(**config: Any) -> Engine:
    common: dict[str, Any] = {"max_num_seqs": 5, "page_size": 8, "max_model_len": 96, "max_prefill_tokens": 24}
    common |= {"num_speculative_tokens": 4, "ngram_pool": 4096, "ngram_max": 3}
    return Engine(tiny_model(), config=EngineConfig(**{**common, **config}))


def run(engine: Engine, count: int = 9) -> tuple[list[Completion], EngineStats]:
    """Twice the same load, the second time in another order; the completions of the first in order of the prompts."""
    every, params = prompts(count), [PARAMS[i % len(PARAMS)] for i in range(count)]
    done = engine.generate(every, params, progress=False)
    engine.generate(every[::-1], params[::-1], progress=False)
    return done, engine.stats()


VARIANTS: list[dict[str, Any]] = [
    {},
    {"depth": 3, "max_num_seqs": 3, "max_prefill_tokens": 5},
    {"ngram_pool": 1, "depth": 0},
    {"num_speculative_tokens": 1, "ngram_max": 16, "debug": True},
    {"num_pages": 16, "depth": 2},  # preemption
    {"enforce_eager": True, "ngram_pool": 63},
    {"adaptive_speculation": True, "speculation_tiers": (0, 1, 4)},
]


def test_a_pool_changes_no_text(tiny_llama: torch.nn.Module) -> None:
    with engine_of(num_speculative_tokens=0, depth=0, max_num_seqs=1) as plainest:
        expected, _ = run(plainest)
    ties, scorer = NearTies(), Scorer(tiny_llama)
    texts = [p for p, own in zip(prompts(9), [PARAMS[i % 3] for i in range(9)], strict=True) for _ in range(own.n)]
    for variant in VARIANTS:
        with engine_of(**variant) as engine:
            done, stats = run(engine)
        assert stats.num_accepted_tokens > 0
        assert (stats.num_preemptions > 0) == ("num_pages" in variant)
        for i, (prompt, a, b) in enumerate(zip(texts, expected, done, strict=True)):
            params = [p for p in PARAMS * 3 for _ in range(p.n)][i]
            assert_same_text(scorer, prompt, a.token_ids, b.token_ids, ties, params, a.seed, a.index)
    ties.check()


def accepted(engine: Engine, prompt: list[int], params: SamplingParams, salt: str = "") -> int:
    """Drafts that a request of its own has accepted."""
    before = engine.stats().num_accepted_tokens
    engine.add_request(prompt, params, cache_salt=salt)
    while engine.has_unfinished_requests():
        engine.step()
    return engine.stats().num_accepted_tokens - before


SAMPLED = SamplingParams(max_tokens=40, temperature=1.0, seed=4, ignore_eos=True)


def test_what_one_request_said_another_is_offered_under_the_same_salt_only() -> None:
    """Sampled text of a random model repeats nothing, so without the pool nothing is accepted. A prompt alone is
    offered too: here it is the text that the first request gave."""
    prompt = prompts(1)[0]
    with engine_of(ngram_pool=0, depth=0) as engine:
        text = engine.generate([prompt], SAMPLED, progress=False)[0].token_ids
        assert max(accepted(engine, prompt, SAMPLED) for _ in range(2)) < 4
    with engine_of(depth=0) as engine:
        assert accepted(engine, prompt, SAMPLED, "one") < 4
        assert accepted(engine, prompt, SAMPLED, "two") < 4
        assert accepted(engine, prompt, SAMPLED, "one") > 28  # of 39: one per step comes from the model itself
        engine.reset_prefix_cache()
        assert accepted(engine, prompt, SAMPLED, "one") < 4
    with engine_of(depth=0, max_prefill_tokens=20) as engine:
        assert accepted(engine, prompt + text, SamplingParams(max_tokens=1)) == 0
        assert 10 < accepted(engine, prompt, SAMPLED) < 36  # n-grams across the edge of chunks are not noted


def test_rejected_drafts_and_stale_history_never_enter_the_pool() -> None:
    """Every entry is an n-gram of a text, with the true token after it; nothing is left of what was drafted. What a
    step emitted past the end of a request goes on as a longer text does."""
    longer = [replace(own, max_tokens=own.max_tokens + 8, ignore_eos=True) for own in PARAMS * 3]
    with engine_of(depth=0, num_speculative_tokens=0) as plain:
        done = plain.generate(prompts(9), longer, progress=False)
    with engine_of(depth=0, num_speculative_tokens=7, ngram_min=1) as engine:
        _, stats = run(engine)
        entries = engine._runner.decode_step.buffers["drafter.ngram_pool"].tolist()
    assert stats.num_draft_tokens - stats.num_accepted_tokens > 100
    each = [prompt for prompt, own in zip(prompts(9), longer, strict=True) for _ in range(own.n)]
    texts = [prompt + c.token_ids for prompt, c in zip(each, done, strict=True)]
    grams = {tuple(text[i : i + 4]) for text in texts for i in range(len(text) - 3)}
    written = {tuple(entry[1:]) for entry in entries if entry[1] != EMPTY}
    assert written <= grams
    assert len(written) > 250
    assert {entry[0] for entry in entries} == {salt_word(b"0/"), EMPTY}


def test_with_equal_launches_acceptance_is_equal_at_every_depth() -> None:
    """Until the first request ends: from there on launches differ, and with them what is in the pool. The prompts are
    the same, and chunks let one request start after the other, so that it finds what the one before has said."""
    counts, params = [], SamplingParams(max_tokens=120, seed=1, temperature=1.0, ignore_eos=True)
    for depth in (0, 1, 3):
        with engine_of(depth=depth, max_model_len=160, page_size=32, max_prefill_tokens=2) as engine:
            for _ in range(4):
                engine.add_request(prompts(1)[0], params)
            for _ in range(36):
                engine.step()
            engine.drain()
            stats = engine.stats()
            counts.append((stats.num_drafts, stats.num_accepted_tokens_per_pos))
            assert stats.num_running == 4
    assert counts[0] == counts[1] == counts[2]
    assert sum(counts[0][1]) > 10


def test_graphs_with_a_pool_are_clean_and_replay_bit_equal_in_the_middle_of_a_load() -> None:
    with engine_of(depth=0, max_num_seqs=4, graph_rows=(4,), ngram_pool=5) as engine:
        runner, step = engine._runner, engine._runner.decode_step
        for prompt in prompts(3):
            engine.add_request(prompt, GREEDY)
        for _ in range(6):
            engine.step()
        assert runner.last_key is not None
        graph, padding = step.store[runner.last_key], step.padding()
        assert padding["drafter.ngram_pool"] == -1
        guard = CaptureGuard(step.buffers, runner.constants())
        key: GraphKey = runner.last_key
        assert runner.on_stream(lambda: guard.inspect(lambda: step.step(key))) == []
        assert runner.on_stream(lambda: compare_replay(graph)) is None
        assert runner.on_stream(lambda: poison(graph, padding, lambda outputs: [out[:3] for out in outputs])) == []
        step.buffers.check_canaries()


def test_the_self_test_passes_and_leaves_the_pool_empty() -> None:
    with engine_of(max_num_seqs=2, self_test=True) as engine:
        assert set(engine._runner.decode_step.buffers["drafter.ngram_pool"].flatten().tolist()) == {EMPTY}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"ngram_pool": -1}, r"ngram_pool must be in 0 \.\. 4194304 entries \(0 is off\), got -1"),
        ({"ngram_pool": 1 << 23}, r"got 8388608"),
        ({"ngram_pool": 8, "drafter": "forced"}, 'serves the drafter "ngram"'),
        ({"ngram_pool": 8, "draft_model": "smollm2-135m"}, 'serves the drafter "ngram"'),
    ],
)
def test_a_pool_that_cannot_be_is_refused(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        EngineConfig(**config)


def test_a_pool_beside_a_draft_model_module_is_refused() -> None:
    with pytest.raises(ValueError, match="names another drafter"):
        Engine(tiny_model(), config=EngineConfig(ngram_pool=8), draft_model=tiny_model())
