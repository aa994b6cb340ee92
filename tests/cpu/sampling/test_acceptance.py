"""Why drafts were lost: the causes, their measurement on the device, and what follows from the counts."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VOCAB, tiny_model
from same_text import Scorer, processed

from graphspec import Completion, Engine, EngineConfig, SamplingParams
from graphspec.execution.iteration import OUTPUT_HEADER
from graphspec.execution.slot_state import allocate_state
from graphspec.records.acceptance import (
    CAUSES,
    WINDOW,
    AcceptanceLog,
    CollapseWatch,
    RejectionRows,
    VerifiedRows,
    classify,
)
from graphspec.records.sampling_params import kind_parts
from graphspec.sampling.rejection import REJECTION, rejection
from graphspec.sampling.row_sampler import RowSampler
from graphspec.sampling.verification import verify
from graphspec.scheduling.slot_table import DECODE

K = 4


def rows_of(*rows: tuple[int, float, bool]) -> RejectionRows:
    ranks, gaps, filler = zip(*rows, strict=True)
    return RejectionRows(np.array(ranks), np.array(gaps, np.float32), np.array(filler))


@pytest.mark.parametrize(
    ("why", "accepted", "delivered", "room", "causes"),
    [
        ((3, 0.1, False), 1, 1, 9, ["", "differs", "after a rejection", "after a rejection"]),
        ((1, 0.0, False), 0, 0, 9, ["sampled away"] + ["after a rejection"] * 3),
        ((0, 0.4, False), 2, 2, 9, ["", "", "forbidden", "after a rejection"]),
        ((7, 0.4, True), 0, 0, 9, ["filler"] + ["after a rejection"] * 3),
        ((9, 0.9, True), 4, 4, 9, [""] * 4),  # all accepted: what was measured means nothing
        ((9, 0.9, False), 4, 1, 9, ["", "past the stop", "past the stop", "past the stop"]),
        ((2, 0.9, False), 2, 1, 9, ["", "past the stop", "differs", "after a rejection"]),
        ((2, 0.9, False), 3, 2, 2, ["", "", "past the limit", "past the limit"]),
        ((2, 0.9, False), 0, 0, 1, ["differs", "past the limit", "past the limit", "past the limit"]),
    ],
)
def test_every_draft_has_one_cause(
    why: tuple[int, float, bool], accepted: int, delivered: int, room: int, causes: list[str]
) -> None:
    counts = [np.array([n]) for n in (accepted, delivered, room)]
    found = classify(rows_of(why), counts[0], counts[1], counts[2], np.arange(K))
    assert [CAUSES[n] if n >= 0 else "" for n in found[0].tolist()] == causes


def test_rank_and_gap_are_those_of_the_processed_logits() -> None:
    """Against a loop: forbidden drafts, ties, temperatures, and rows that accept everything."""
    rows, generator = 40, torch.Generator().manual_seed(1)
    logits = torch.randint(-3, 4, (rows, K + 1, 17), generator=generator).float()  # coarse, so that ties are common
    logits[torch.rand(logits.shape, generator=generator) < 0.2] = float("-inf")
    drafts = torch.randint(0, 17, (rows, K), generator=generator)
    samples = torch.where(torch.rand((rows, K), generator=generator) < 0.7, drafts, (drafts + 1) % 17)
    samples = torch.cat((samples, samples[:, :1]), dim=1)
    num_valid = torch.randint(0, K + 1, (rows,), generator=generator)
    state = allocate_state(rows, K, 8, 17, torch.device("cpu"))
    state.sampling.temperature[:rows] = torch.rand(rows, generator=generator) * (torch.arange(rows) % 3 > 0)
    verdict = verify(drafts, samples, torch.full((rows,), K))
    for base in ("greedy", "plain"):
        sampler = RowSampler.of(kind_parts(base), state.sampling, state.processors, torch.arange(rows))
        found = rejection(logits, drafts, verdict, num_valid, sampler)
        assert found.shape == (rows, REJECTION)
        rejected = 0
        for row in range(rows):
            at = int(verdict.num_emitted[row]) - 1
            if at == K:
                continue
            rejected += 1
            own, token = logits[row, at].double(), int(drafts[row, at])
            order = sorted(range(17), key=lambda t, own=own: (-float(own[t]), t))  # type: ignore[misc]
            forbidden = own[token] == float("-inf")
            assert int(found[row, 0]) == (0 if forbidden else order.index(token) + 1)
            temperature = float(state.sampling.temperature[row]) if base == "plain" else 0.0
            p = (own / (temperature or 1.0)).softmax(-1)
            gap = float(found[row : row + 1, 1].view(torch.float32))
            assert gap == pytest.approx(float(p.max() - p[token]), abs=1e-5)
            assert bool(found[row, 2]) == (at >= int(num_valid[row]))
        assert rejected > 10


def test_what_another_k_would_have_given() -> None:
    """Exactly: a row that accepted a of k drafts accepts min(a, k') of k'."""
    log = AcceptanceLog(3)
    accepted = np.array([0, 1, 3, 3])
    why = rows_of((2, 0.5, False), (5, 0.1, False), (9, 0.9, False), (9, 0.9, False))
    log.record(VerifiedRows(why, accepted, accepted, np.full(4, 99), np.full(4, 5)), 3)
    report = log.report()
    assert report.tokens_per_step == [1.0, 1.75, 2.25, 2.75]
    assert (report.num_drafts, report.delivered) == (4, [3, 2, 2])
    assert report.differs.mean_rank == 3.5
    assert report.differs.mean_gap == pytest.approx(0.3)
    assert report.best_k([1.0, 1.0, 1.0, 1.0]) == 3
    assert report.best_k([1.0, 1.2, 1.8, 2.4]) == 1
    assert report.best_k([1.0, 2.0, 3.0, 4.0]) == 0


def verified(accepted: Any, context: Any) -> VerifiedRows:
    ones = np.ones(len(accepted), np.int64)
    why = RejectionRows(3 * ones, np.zeros(len(accepted), np.float32), ones < 0)
    return VerifiedRows(why, accepted, accepted, 9 * ones, context)


def test_a_collapse_of_acceptance_is_noticed_against_its_own_history(caplog: pytest.LogCaptureFixture) -> None:
    """Once per window, for the position that fell, and not for one that was never good."""
    rng = np.random.default_rng(0)
    log = AcceptanceLog(2, CollapseWatch())

    def play(good: float, rows: int) -> None:
        for _ in range(rows // 50):
            accepted = (rng.random(50) < good).astype(np.int64)  # never two
            log.record(verified(accepted, rng.choice([3, 70, 700, 7000], 50)), 2)

    play(0.7, 4 * WINDOW)
    assert log.report().alarms == []
    play(0.1, WINDOW)
    assert len(log.report().alarms) == len(caplog.messages) == 1
    assert caplog.messages[0].startswith("acceptance of draft 0 fell to 0.1")
    play(0.7, WINDOW)
    assert len(log.report().alarms) == 1


def test_a_collapse_at_one_length_of_context_is_noticed_where_the_positions_look_well() -> None:
    """Each power of two has its own windows and its own history, whatever share of the rows it has."""
    rng, watch, found = np.random.default_rng(0), CollapseWatch(), list[str]()

    def play(good_behind_1024: float, rows: int) -> None:
        for _ in range(rows // 50):
            context = rng.choice([0, 1, 40, 300, 1024, 1500, 2047], 50, p=[0.02, 0.08, 0.5, 0.3, 0.04, 0.03, 0.03])
            good = np.where(context >= 1024, good_behind_1024, 0.8)
            found.extend(watch.observe(verified((rng.random((50, 3)) < good[:, None]).cumprod(1).sum(1), context), 3))

    play(0.6, 20 * WINDOW)
    assert found == []
    play(0.05, 14 * WINDOW)
    assert len(found) == 1
    assert re.match(r"acceptance of drafts behind 1024 to 2047 tokens fell to 0.0\d in the last 5\d\d rows; ", found[0])


def test_positions_that_a_step_did_not_verify_count_neither_way() -> None:
    """With k chosen anew for every step, the last positions are seldom tried."""
    watch, rows = CollapseWatch(), np.full(50, 2)
    for _ in range(2 * WINDOW // 50):
        assert watch.observe(verified(rows, 9 + 0 * rows), 2) == []
    for _ in range(4 * WINDOW // 50):
        assert watch.observe(verified(rows // 2, 9 + 0 * rows), 1) == []


PARAMS = [
    SamplingParams(max_tokens=30, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.7, seed=1),
    SamplingParams(max_tokens=21, temperature=1.0, top_k=8, seed=2, ignore_eos=True),
    SamplingParams(max_tokens=30, ignore_eos=True, bad_words_ids=[[t] for t in range(60, 120)]),
    SamplingParams(max_tokens=30, stop_token_ids=range(150, 200), min_tokens=5),
    SamplingParams(max_tokens=12, speculation=False, ignore_eos=True),
]


def prompts() -> list[list[int]]:
    rng = random.Random(4)
    parts = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 8))] for _ in range(12)]
    return [part * 3 for part in parts]


def engine_of(*, draft: bool, **config: Any) -> Engine:
    """Drafting by single tokens, or by the model itself, which says its likeliest token whatever is asked for."""
    common: dict[str, Any] = {"num_speculative_tokens": K, "max_num_seqs": 6, "page_size": 8, "max_model_len": 64}
    common |= {"explain_acceptance": True, "ngram_min": 1, "draft_shares_noise": False}
    drafter = tiny_model() if draft else None
    return Engine(tiny_model(), config=EngineConfig(**{**common, **config}), draft_model=drafter)


@pytest.mark.parametrize("draft", [False, True], ids=["ngram", "draft_model"])
def test_causes_are_those_of_a_float64_model(draft: bool) -> None:
    """Step by step with the synchronous engine: drafts before a step against the tokens it gave. Steps that end a
    request may have accepted drafts that nobody sees, so those are held by the sum only."""
    scorer, expected, found = Scorer(tiny_model()), Counter[str](), Counter[str]()
    with engine_of(draft=draft, depth=0) as engine:
        for i, prompt in enumerate(prompts()):
            engine.add_request(prompt, PARAMS[i % len(PARAMS)])
        table, state, log = engine._scheduler.table, engine._runner._iteration.state, engine._scheduler.acceptance
        while engine.has_unfinished_requests():
            before = {}
            for slot, request in enumerate(table.request):
                if request is not None and table.phase[slot] == DECODE and request.params.speculation:
                    before[slot] = (request, request.token_ids, state.drafts[slot].tolist(), int(state.num_valid[slot]))
            counted = Counter({name: sum(n) for name, n in log.report().lost.items()})
            engine.step()
            now = Counter({name: sum(n) for name, n in log.report().lost.items()})
            if any(request.finish_reason for request, *_ in before.values()):
                continue
            found += now - counted
            for request, known, drafts, num_valid in before.values():
                new = request.token_ids[len(known) :]
                if len(new) > K:
                    continue
                at, params = len(new) - 1, request.params
                text = known + new[:at]
                logits = processed(scorer.logits(text), text, len(request.prompt_ids), params, scorer.eos_ids)
                own = float(logits[drafts[at]])
                cause = "forbidden" if own == float("-inf") else "differs"
                cause = "sampled away" if drafts[at] == int(logits.argmax()) else cause
                expected["filler" if at >= num_valid else cause] += 1
                past = len(known) + K - max(len(known) + at + 1, request.limit)
                expected["past the limit"] += max(0, past)
                expected["after a rejection"] += K - at - 1 - max(0, past)
        report, stats = engine.explain_acceptance(), engine.stats()
    assert +found == +expected
    assert {"after a rejection", *(("forbidden", "sampled away") if draft else ("differs", "filler"))} <= set(+found)
    per_position = np.array([report.delivered, *report.lost.values()]).sum(axis=0)
    assert per_position.tolist() == [stats.num_drafts] * K
    assert sum(report.delivered) == stats.num_delivered_draft_tokens
    assert report.tokens_per_step[K] == pytest.approx(stats.mean_acceptance_length)


def texts(done: list[Completion]) -> list[list[int]]:
    return [c.token_ids for c in done]


def test_requests_have_their_own_account_and_asking_changes_no_token() -> None:
    every = [PARAMS[i % len(PARAMS)] for i in range(12)]
    with engine_of(draft=False, depth=2) as engine:
        done = engine.generate(prompts(), every, progress=False)
        total = engine.explain_acceptance()
    own = [c.acceptance for c in done if c.acceptance is not None]
    assert sum(a.num_drafts for a in own) == total.num_drafts
    for cause in CAUSES:
        assert np.sum([a.lost[cause] for a in own], axis=0).tolist() == total.lost[cause]
    assert [c.acceptance is None for c in done] == [not params.speculation for params in every]
    with engine_of(draft=False, depth=2, explain_acceptance=False) as engine:
        assert texts(engine.generate(prompts(), every, progress=False)) == texts(done)
        assert engine._runner._ring.take().decode_output.shape[1] == OUTPUT_HEADER + 1 + K
        with pytest.raises(ValueError, match="nothing was measured"):
            engine.explain_acceptance()
