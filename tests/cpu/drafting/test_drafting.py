"""Drafters and acceptance against plain Python."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphspec import EngineConfig
from graphspec.drafting import Drafter, DraftInputs, ForcedDrafter, NgramDrafter, NoDrafter, create_drafter
from graphspec.engine.resolve import resolve
from graphspec.execution.slot_state import allocate_state
from graphspec.models.paging import Paging
from graphspec.records.sampling_params import kind_parts
from graphspec.sampling.row_sampler import RowSampler
from graphspec.sampling.verification import verify

EXACT = settings(max_examples=150, deadline=None, derandomize=True)


def oracle(known: list[int], min_n: int, max_n: int, k: int) -> list[int]:
    """Longest n first, latest match first; the continuation past the newest token goes on with what was drafted."""
    for n in range(min(max_n, len(known) - 1), min_n - 1, -1):
        for end in range(len(known) - 1, n - 1, -1):  # the match is known[end - n : end]
            if known[end - n : end] == known[-n:]:
                text = list(known)
                for _ in range(k):
                    text.append(text[end])
                    end += 1
                return text[len(known) :]
    return [known[-1]] * k


def told(history: torch.Tensor, lengths: torch.Tensor) -> DraftInputs:
    """What a drafter is told after a step that emitted the last token of each row."""
    rows, newest = len(history), lengths - 1
    slots, state = torch.arange(rows), allocate_state(rows, 0, 1, 3, torch.device("cpu"))
    return DraftInputs(
        slots=slots,
        block_tables=torch.zeros(rows, 1, dtype=torch.int32),
        tokens=history.gather(1, newest.unsqueeze(1)),
        start=newest,
        num_emitted=torch.ones_like(newest),
        hidden=(),
        history=history,
        newest=newest,
        sampler=RowSampler.of(kind_parts("greedy"), state.sampling, state.processors, slots),
        salts=torch.zeros_like(slots),
    )


def propose(rows: list[list[int]], width: int, stale: list[int], drafter: Drafter, k: int) -> list[list[int]]:
    """Drafts for a batch of texts, in a history whose places past each text repeat `stale`."""
    history = torch.tensor([(row + stale * width)[:width] for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    drafts, num_valid = drafter.propose(told(history, lengths), k)
    assert set(num_valid.tolist()) <= {0, k}
    fillers = [row for row, n in zip(drafts.tolist(), num_valid.tolist(), strict=True) if not n]
    assert fillers == [[row[-1]] * k for row, n in zip(rows, num_valid.tolist(), strict=True) if not n]
    assert drafts.dtype == torch.int64
    result: list[list[int]] = drafts.tolist()
    return result


ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=5)


@EXACT
@given(ROWS, st.integers(0, 6), st.lists(st.integers(0, 2), min_size=1, max_size=5), st.data())
def test_ngram_equals_brute_force(rows: list[list[int]], spare: int, stale: list[int], data: st.DataObject) -> None:
    """Mixed batches of short and long texts, with a stale history that would match too."""
    min_n = data.draw(st.integers(1, 3))
    max_n, k = data.draw(st.integers(min_n, 5)), data.draw(st.integers(1, 8))
    width = max(len(row) for row in rows) + spare
    drafts = propose(rows, width, stale, NgramDrafter(min_n, max_n), k)
    assert drafts == [oracle(row, min_n, max_n, k) for row in rows]


@pytest.mark.parametrize(
    ("known", "drafts"),
    [
        ([7], [7, 7, 7, 7]),  # nothing to match: the newest token is the filler
        ([1, 2, 3], [3, 3, 3, 3]),
        ([5, 5], [5, 5, 5, 5]),
        ([1, 2, 9, 1, 2], [9, 1, 2, 9]),  # past the newest token the continuation repeats itself
        ([1, 2, 8, 0, 2, 6, 0, 1, 2], [8, 0, 2, 6]),  # the longer match wins over a later one
        ([1, 2, 8, 0, 1, 2, 6, 0, 1, 2], [6, 0, 1, 2]),  # of equal ones the latest
        ([4, 1, 2, 3, 8, 0, 1, 2, 3, 9, 4, 1, 2, 3], [9, 4, 1, 2]),  # no longer match than max_n is looked for
    ],
)
def test_ngram_by_example(known: list[int], drafts: list[int]) -> None:
    assert propose([known], len(known), [0], NgramDrafter(1, 3), 4) == [drafts]
    assert oracle(known, 1, 3, 4) == drafts


def test_matches_shorter_than_min_n_are_not_used() -> None:
    assert propose([[1, 2, 8, 0, 2]], 8, [2], NgramDrafter(2, 3), 3) == [[2, 2, 2]]


def test_forced_drafts_like_ngram_and_none_drafts_nothing() -> None:
    known = told(torch.tensor([[1, 2, 9, 1, 2, 0], [3, 0, 0, 0, 0, 0]]), torch.tensor([5, 1]))
    ngram = NgramDrafter(1, 3)
    forced = ForcedDrafter(ngram, 2)
    assert torch.equal(forced.propose(known, 3).token_ids, ngram.propose(known, 3).token_ids)
    assert ngram.propose(known, 3).num_valid.tolist() == [3, 0]
    assert (forced.forced_num_accepted, ngram.forced_num_accepted, NoDrafter.forced_num_accepted) == (2, None, None)
    assert NoDrafter().propose(known, 0).token_ids.shape == (2, 0)
    assert {d.lookahead(3) for d in (ngram, forced, NoDrafter())} == {0}


def test_the_configuration_names_the_drafter() -> None:
    def created(**config: Any) -> Drafter:
        resolved = resolve(EngineConfig(**config), model_limit=64, page_bytes=1, free_bytes=1 << 20)
        return create_drafter(resolved, None, Paging(16, 4, 64), 211, torch.device("cpu"))

    assert created(num_speculative_tokens=3, drafter="forced", forced_num_accepted=2).forced_num_accepted == 2
    assert {created(num_speculative_tokens=3, drafter=name).name for name in ("auto", "ngram")} == {"ngram"}
    assert created(num_speculative_tokens=0, drafter="ngram").name == "none"


SAMPLES = [11, 12, 13, 14]


@pytest.mark.parametrize(
    ("drafts", "emitted"),
    [
        ([11, 12, 13], [11, 12, 13, 14]),  # perfect: the sample after the last draft is the bonus
        ([0, 12, 13], [11]),  # the first differs: later matches do not count
        ([11, 0, 13], [11, 12]),
        ([11, 12, 0], [11, 12, 13]),
        ([0, 0, 0], [11]),
        ([0, 12, 0], [11]),
        ([12, 11, 14], [11]),  # right tokens at wrong places
    ],
)
def test_drafts_are_accepted_up_to_the_first_that_differs(drafts: list[int], emitted: list[int]) -> None:
    rows = torch.tensor([drafts, [11, 12, 13]])  # beside a perfect row
    verdict = verify(rows, torch.tensor([SAMPLES] * 2), torch.tensor([3, 3]))
    assert verdict.num_emitted.tolist() == [len(emitted), 4]
    assert verdict.newest.tolist() == [emitted[-1], 14]
    assert verdict.emitted[0, : len(emitted)].tolist() == emitted
    assert verdict.emitted[1].tolist() == SAMPLES


def test_without_drafts_the_sample_is_the_bonus() -> None:
    empty = torch.zeros(2, 0, dtype=torch.int64)
    verdict = verify(empty, torch.tensor([[5], [6]]), torch.tensor([0, 0]))
    assert [t.tolist() for t in verdict] == [[[5], [6]], [1, 1], [5, 6]]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_forced_acceptance_emits_that_many_drafts_and_the_sample_after_them(count: int) -> None:
    drafts = torch.tensor([[11, 12, 13], [1, 2, 3]])
    verdict = verify(drafts, torch.tensor([SAMPLES] * 2), torch.tensor([3, 3]), forced=count)
    assert verdict.num_emitted.tolist() == [count + 1] * 2
    assert verdict.newest.tolist() == [SAMPLES[count]] * 2
    assert verdict.emitted[:, : count + 1].tolist() == [[*row, SAMPLES[count]] for row in drafts[:, :count].tolist()]


@pytest.mark.parametrize("forced", [None, 2])
def test_a_row_accepts_no_more_than_it_may(forced: int | None) -> None:
    drafts, samples = torch.tensor([SAMPLES[:3]] * 3), torch.tensor([SAMPLES] * 3)
    verdict = verify(drafts, samples, torch.tensor([0, 1, 3]), forced)
    accepted = [0, 1, 3 if forced is None else forced]
    assert verdict.num_emitted.tolist() == [n + 1 for n in accepted]
    assert verdict.newest.tolist() == [SAMPLES[n] for n in accepted]
    assert verdict.emitted.tolist() == [SAMPLES] * 3


@EXACT
@given(st.integers(0, 5), st.integers(1, 4), st.randoms(use_true_random=False))
def test_acceptance_equals_a_loop(k: int, rows: int, rng: random.Random) -> None:
    drafts = [[rng.randrange(2) for _ in range(k)] for _ in range(rows)]
    samples = [[rng.randrange(2) for _ in range(k + 1)] for _ in range(rows)]
    most = [rng.randint(0, k) for _ in range(rows)]
    verdict = verify(torch.tensor(drafts).long().view(rows, k), torch.tensor(samples), torch.tensor(most))
    for row in range(rows):
        count = 0
        while count < most[row] and drafts[row][count] == samples[row][count]:
            count += 1
        assert int(verdict.num_emitted[row]) == count + 1
        assert verdict.emitted[row, : count + 1].tolist() == samples[row][: count + 1]
        assert int(verdict.newest[row]) == samples[row][count]
