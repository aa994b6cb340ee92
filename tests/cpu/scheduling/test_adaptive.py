"""k per step: the rule, what it is worth on a recorded load, and that text and drafter survive any change of k."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import VOCAB, tiny_model
from same_text import NearTies, Scorer, assert_same_text

from graphspec import Engine, EngineConfig, SamplingParams
from graphspec.execution.iteration import Iteration, PrefillInputs
from graphspec.records.config import halving_tiers
from graphspec.records.launch import IntArray
from graphspec.scheduling.draft_policy import PRIOR_RATE, AdaptiveK, RunningAcceptance, StepCosts, step_towards

TOOLS = Path(__file__).resolve().parents[3] / "tools"
LOAD = Path(__file__).resolve().parents[2] / "data" / "load.json"


def test_tiers_are_about_halves_and_neighbours_are_one_step_away() -> None:
    assert [halving_tiers(k) for k in (0, 1, 3, 5, 7)] == [(0,), (0, 1), (0, 1, 2, 3), (0, 1, 2, 3, 5), (0, 1, 2, 4, 7)]
    assert [step_towards((0, 1, 3, 5), 1, wanted) for wanted in (0, 1, 3, 5)] == [0, 1, 3, 3]


def test_a_step_costs_its_median_or_what_its_number_of_tokens_suggests() -> None:
    costs = StepCosts()
    assert costs(4, 3) == costs(1, 0)  # nothing is known
    for seconds in (1.0, 50.0, 1.2):
        costs.record_profiled(1, 0, seconds)
    costs.record_profiled(4, 3, 4.2)
    assert costs(1, 0) == 1.2
    assert costs(2, 3) == pytest.approx(1.2 + 3.0 * 7 / 15)
    costs.record(2, 3, 9.0)
    assert (costs(2, 3), costs(16, 3)) == (9.0, 4.2)


def test_a_machine_that_slows_down_makes_every_k_dearer_alike() -> None:
    costs = StepCosts()
    for k, seconds in ((0, 1.0), (1, 1.1), (3, 1.5)):
        costs.record_profiled(1, k, seconds)
    for _ in range(20):
        costs.record(1, 0, 2.0)
    assert [costs(1, k) for k in (0, 1, 3)] == pytest.approx([2.0, 2.2, 3.0])
    for _ in range(40):
        for k, seconds in ((1, 2.8), (1, 2.8), (1, 2.8), *[(0, 2.0)] * 20):
            costs.record(1, k, seconds)
    assert [costs(1, k) for k in (0, 1, 3)] == pytest.approx([2.0, 2.8, 3.0])  # k = 1 costs more than was thought
    for _ in range(20):
        costs.record(1, 0, 1.0)
    assert [costs(1, k) for k in (0, 1, 3)] == pytest.approx([1.0, 1.4, 1.5])
    for seconds in (9.0, 1.3, 1.3):  # rows that were not seen before, the first of them late for some other reason
        costs.record(2, 0, seconds)
    assert costs(2, 0) == pytest.approx(1.3)
    assert costs(1, 0) == pytest.approx(1.0)


ONE = np.zeros(1, np.int64)  # the slot 0


def test_acceptance_is_conditional_recent_and_inherited_where_nothing_was_seen() -> None:
    acceptance = RunningAcceptance(17, 3)
    none = acceptance.expected(ONE)
    assert none == pytest.approx(np.cumsum([0.0, *(PRIOR_RATE**i for i in (1, 2, 3))]).tolist())
    slots, new = np.arange(16), np.array([16])
    for _ in range(50):
        acceptance.record(slots, np.array([0, 1, 2, 2] * 4), 2)
    assert acceptance.expected(new)[1:3] == pytest.approx([0.75, 1.25], abs=0.03)
    assert acceptance.expected(new)[3] == pytest.approx(1.25 + 0.75 * 2 / 3 * 2 / 3, abs=0.03)  # like the one before
    for _ in range(20):
        acceptance.record(slots, np.zeros(16, np.int64), 2)
    assert acceptance.expected(new)[3] < 0.05


def test_a_request_is_judged_by_its_own_drafts_and_a_new_one_by_those_of_all() -> None:
    acceptance, slots = RunningAcceptance(3, 2), np.arange(2)
    for _ in range(30):
        acceptance.record(slots, np.array([2, 0]), 2)
    right, wrong, new = (acceptance.expected(np.array([slot]))[2] for slot in range(3))
    assert right > 1.5
    assert wrong < 0.2
    assert wrong < new < right
    assert acceptance.expected(np.arange(3))[2] == pytest.approx(right + wrong + new)
    acceptance.begin(0)
    assert acceptance.expected(ONE)[2] == pytest.approx(new)


def policy_with(costs: dict[int, float], rates: dict[int, float], drift: float = 0.0) -> tuple[AdaptiveK, list[int]]:
    """A policy after 2,000 steps of 4 rows in a world of these costs and chances per position, and its choices."""
    policy, draw, chosen, slots = AdaptiveK(sorted(costs), 4, lambda rows: rows), random.Random(1), [], np.arange(4)
    for k, seconds in costs.items():  # on padding, which is not quite what is served
        policy.costs.record_profiled(4, k, seconds * draw.uniform(0.95, 1.05))
    pace = 1.0
    for step in range(2000):
        if step % 150 == 0:
            pace = 1.0 + drift * draw.random()
        k = policy.choose(4, slots)
        policy.launched(k)
        right = [next((i for i in range(k + 1) if draw.random() >= rates.get(i, 0.0)), k + 1) for _ in range(4)]
        most = max(costs)
        policy.answered(4, k, pace * costs[k], slots, np.minimum(right, most), min(k + 1, most))
        chosen.append(k)
    return policy, chosen


@pytest.mark.parametrize(
    ("costs", "rates", "best"),
    [
        ({0: 1.0, 1: 1.05, 3: 1.1, 5: 1.2}, dict.fromkeys(range(6), 0.9), 5),
        ({0: 1.0, 1: 1.05, 3: 1.7, 5: 2.6}, dict.fromkeys(range(6), 0.7), 1),
        ({0: 1.0, 1: 1.2, 3: 1.4, 5: 1.6}, dict.fromkeys(range(6), 0.1), 0),
        ({0: 1.0, 1: 1.2, 3: 1.3, 5: 3.0}, {0: 0.5, 1: 0.9, 2: 0.9}, 3),
    ],
)
@pytest.mark.parametrize("drift", [0.0, 1.0])
def test_the_best_k_is_found_and_trying_others_stays_within_its_share(
    costs: dict[int, float], rates: dict[int, float], best: int, drift: float
) -> None:
    _, chosen = policy_with(costs, rates, drift)
    settled = chosen[200:]
    assert settled.count(best) / len(settled) > 0.9
    assert set(settled) == set(costs)  # each is tried now and then

    def tokens(k: int) -> float:
        return 1.0 + float(np.cumprod([rates.get(i, 0.0) for i in range(k)]).sum())

    ideal = tokens(best) / costs[best]
    reached = sum(tokens(k) for k in settled) / sum(costs[k] for k in settled)
    assert reached > 0.98 * ideal


def test_with_one_tier_there_is_nothing_to_choose() -> None:
    policy = AdaptiveK((3,), 4, lambda rows: rows)
    policy.answered(4, 3, 1.0, np.arange(4), np.zeros(4, np.int64), 3)
    assert policy.choose(4, np.arange(0)) == 3
    assert policy.acceptance.expected(ONE)[1] == PRIOR_RATE  # nothing was learnt


def wander(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Choose any tier, for a few steps each, in place of the rule."""
    pick, current = random.Random(seed), [0, 0]

    def choose(self: AdaptiveK, num_rows: int, speculating: IntArray) -> int:
        if current[1] == 0:
            current[:] = [pick.choice(self.tiers), pick.randint(1, 6)]
        current[1] -= 1
        return current[0] if current[0] in self.tiers else self.tiers[-1]

    monkeypatch.setattr(AdaptiveK, "choose", choose)


def requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(count)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(2, 20))] for _ in range(count)]
    kinds: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 4}, {"speculation": False}, {"logprobs": 2}]
    return prompts, [SamplingParams(max_tokens=40, ignore_eos=True, **kinds[i % 4]) for i in range(count)]


CHANGING: list[dict[str, Any]] = [
    {"depth": 0},
    {"depth": 1, "explain_acceptance": True},
    {"depth": 3, "num_pages": 22},  # preemption
    {"depth": 2, "enforce_eager": True},
    {"depth": 1, "draft": "equal", "max_prefill_tokens": 5},
    {"depth": 2, "draft": "equal", "explain_acceptance": True},
]


@pytest.mark.parametrize("variant", CHANGING, ids=str)
def test_a_changing_k_changes_no_text(variant: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenarios 30 and 34: every k up to 5 and back, launches of different k in flight together."""
    prompts, params = requests(8)
    common: dict[str, Any] = {"max_num_seqs": 4, "graph_rows": (2, 4), "page_size": 8, "max_model_len": 96}
    with Engine(tiny_model(), config=EngineConfig(**common, depth=0, num_speculative_tokens=0)) as plain:
        expected = plain.generate(prompts, params, progress=False)
    config = {key: value for key, value in variant.items() if key != "draft"}
    wander(monkeypatch, 5)
    draft = tiny_model() if "draft" in variant else None
    tiers = (0, 1, 2, 5)
    adaptive = EngineConfig(
        **common, **config, num_speculative_tokens=5, adaptive_speculation=True, speculation_tiers=tiers
    )
    scorer, ties = Scorer(tiny_model()), NearTies()
    with Engine(tiny_model(), config=adaptive, draft_model=draft) as engine:
        for _ in range(2):  # the second time from the prefix cache
            done = engine.generate(prompts, params, progress=False)
            for prompt, own, a, b in zip(prompts, params, expected, done, strict=True):
                assert_same_text(scorer, prompt, a.token_ids, b.token_ids, ties, own, a.seed)
        stats = engine.stats()
    assert set(stats.num_steps_per_k) == set(tiers)
    assert stats.num_draft_tokens == sum(stats.num_draft_tokens_per_pos)
    assert stats.num_accepted_tokens > 20
    assert stats.off_graph_decode_steps == 0 or "enforce_eager" in variant
    assert (stats.num_preemptions > 0) == ("num_pages" in variant)
    ties.check()


def test_a_draft_model_that_was_left_out_catches_up_before_it_drafts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to the target it is always accepted, whatever it missed at k = 0, and in pages it shares; drafts are lost
    to near-ties only."""
    prompts, _ = requests(6)
    wander(monkeypatch, 8)
    read, caught_up = Iteration.catch_up, []

    def watched(self: Iteration, inputs: PrefillInputs) -> None:
        caught_up.append(len(inputs.positions))
        read(self, inputs)

    monkeypatch.setattr(Iteration, "catch_up", watched)
    config = EngineConfig(
        num_speculative_tokens=4, adaptive_speculation=True, max_num_seqs=3, page_size=4, max_model_len=96,
        max_prefill_tokens=7, depth=1,
    )  # fmt: skip
    with Engine(tiny_model(), config=config, draft_model=tiny_model()) as engine:
        for _ in range(2):
            engine.generate(prompts, SamplingParams(max_tokens=60, ignore_eos=True), progress=False)
        stats = engine.stats()
    assert len(caught_up) > 5
    assert max(caught_up) <= 7
    assert stats.num_steps_per_k[0] > 20
    lost = stats.num_draft_tokens - stats.num_accepted_tokens
    assert stats.num_drafts > 60
    # A row that starts decoding in a step whose drafts were not asked for has fewer than the step takes, once.
    assert lost <= 0.02 * stats.num_draft_tokens


def test_costs_are_measured_at_start_and_while_serving() -> None:
    config = EngineConfig(num_speculative_tokens=3, adaptive_speculation=True, max_num_seqs=3, max_model_len=96)
    with Engine(tiny_model(), config=config) as engine:
        costs = engine._scheduler.policy.costs
        assert set(costs._cost) == {(rows, k) for rows in (1, 3) for k in (0, 1, 2, 3)}
        assert all(seconds > 0 for seconds in costs._cost.values())
        prompts, params = requests(6)
        for _ in range(2):  # a step that captures its graph says nothing
            engine.generate(prompts, params, progress=False)
        assert {rows for rows, _ in costs._cost} == {1, 2, 3}
        assert engine.stats().off_graph_decode_steps == 0


def test_prompts_do_not_count_when_k_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario 25: rows in the middle of their prompt, and requests without speculation, bring no drafts."""
    asked: list[tuple[int, int]] = []

    def choose(self: AdaptiveK, num_rows: int, speculating: IntArray) -> int:
        asked.append((num_rows, len(speculating)))
        return 1

    monkeypatch.setattr(AdaptiveK, "choose", choose)
    config = EngineConfig(
        num_speculative_tokens=1, adaptive_speculation=True, max_num_seqs=3, max_model_len=96, depth=0,
        max_prefill_tokens=8,
    )  # fmt: skip
    with Engine(tiny_model(), config=config) as engine:
        engine.add_request([5, 6], SamplingParams(max_tokens=30, ignore_eos=True))
        engine.step()
        engine.add_request([7, 8], SamplingParams(max_tokens=30, ignore_eos=True, speculation=False))
        engine.step()
        engine.add_request([9] * 40, SamplingParams(max_tokens=4, ignore_eos=True))
        for _ in range(5):
            engine.step()
    assert asked == [(0, 0), (1, 1), *[(2, 1)] * 5]


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"speculation_tiers": (0, 3)}, "what adaptive_speculation chooses among"),
        ({"adaptive_speculation": True, "num_speculative_tokens": 0}, "needs num_speculative_tokens above 0"),
        ({"adaptive_speculation": True, "speculation_tiers": (0, 2)}, r"must ascend from 0 or more to .* \(3\)"),
        ({"adaptive_speculation": True, "speculation_tiers": (3, 0, 3)}, "must ascend"),
        ({"adaptive_speculation": True, "speculation_tiers": (-1, 3)}, "must ascend"),
    ],
)
def test_nonsense_is_refused(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        EngineConfig(**config)


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("simulate_k")


@pytest.mark.parametrize("drift", [0.0, 1.0])
@pytest.mark.parametrize("concurrency", [1, 4, 16])
def test_on_a_recorded_load_it_is_as_good_as_the_best_k_in_hindsight(
    simulation: Any, concurrency: int, drift: float
) -> None:
    """Answers of SmolLM2-135M and measured step times, played through the scheduler; see tools/simulate_k.py."""
    load = simulation.read_load(LOAD)
    found = simulation.compare(load, [(concurrency, load.answers)], drift)
    adaptive = found.pop("adaptive")
    assert adaptive >= 0.97 * max(found.values()), found


def test_on_a_changing_load_it_beats_every_fixed_k(simulation: Any) -> None:
    """One request after another that quotes, then sixteen at once that do not, and again."""
    load = simulation.read_load(LOAD)
    by_gain = sorted(load.answers, key=lambda a: sum(a.right) / max(1, len(a.right)))
    plain, quoting = by_gain[:16], by_gain[-6:]
    found = simulation.compare(load, [(1, quoting), (16, plain)] * 3)
    adaptive = found.pop("adaptive")
    assert adaptive > max(found.values()), found


def test_the_record_counts_what_the_drafter_would_get_right(simulation: Any) -> None:
    text = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 4]
    # Behind the second 6 the drafts are 7 8 9 and then the period again, of which the end of the text is not one.
    assert simulation.num_right(text, 5, 4) == [0, 3, 2, 1, 0, 0]
