"""Acceptance accounting: what is counted, before and after the stop rules."""

from __future__ import annotations

import numpy as np
import pytest

from graphspec.scheduling.spec_stats import SpecStats


@pytest.mark.parametrize(
    ("accepted", "mean", "rates"),
    [
        ([3, 3], 4.0, [1.0, 1.0, 1.0]),  # perfect
        ([0, 0], 1.0, [0.0, 0.0, 0.0]),  # early mismatch
        ([0, 1, 2, 3], 2.5, [0.75, 0.5, 0.25]),  # several requests
        ([], 1.0, [0.0, 0.0, 0.0]),  # nothing verified
    ],
)
def test_acceptance_table(accepted: list[int], mean: float, rates: list[float]) -> None:
    """Scenario 18."""
    stats = SpecStats(3)
    stats.record(3, np.array(accepted, np.int64), np.array(accepted, np.int64))
    assert stats.num_drafts == len(accepted)
    assert stats.num_draft_tokens == 3 * len(accepted)
    assert stats.num_accepted_tokens == sum(accepted)
    assert stats.mean_acceptance_length == mean
    assert stats.acceptance_rates == rates
    assert stats.num_accepted_tokens_per_pos.tolist() == [round(rate * len(accepted)) for rate in rates]
    assert stats.draft_acceptance_rate == (sum(accepted) / (3 * len(accepted)) if accepted else 0.0)


def test_the_cut_of_a_stop_rule_is_counted_apart() -> None:
    """Bug class I: acceptance is counted before the cut, delivery after it."""
    stats = SpecStats(4)
    stats.record(4, np.array([4, 2]), np.array([1, 2]))
    assert (stats.num_accepted_tokens, stats.num_delivered_draft_tokens) == (6, 3)
    assert stats.mean_acceptance_length == 4.0


def test_without_speculation_nothing_is_counted() -> None:
    stats = SpecStats(0)
    stats.record(0, np.zeros(5, np.int64), np.zeros(5, np.int64))
    assert (stats.num_drafts, stats.num_draft_tokens, stats.mean_acceptance_length) == (0, 0, 1.0)
