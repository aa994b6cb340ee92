"""How many drafts a step takes, decided for the whole batch from what steps cost and what was accepted. No torch.

    tokens of a step = rows + the sum over those that speculate of (expected number of accepted drafts at this k)

The best k has most tokens per second. Both factors are measured while serving, so nothing needs to be known about
model, machine, drafter or text, and k becomes 0 where speculation does not pay (compare Liu et al. 2024, "goodput",
arXiv:2406.14066). Inside a step k is static: every row has 1 + k positions.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from graphspec.records.launch import IntArray

MARGIN = 0.05  # a larger k must promise so much more before it is taken; a smaller one need not
LEARNING_STEPS, PACE_STEPS = 8, 9  # after another k, from which its cost is learnt; of which the pace is the median
FEW_STEPS = 3  # of a k at a number of rows, that are always learnt from
HORIZON, OWN_HORIZON = 64.0, 32.0  # rows after which an observed acceptance counts for half, roughly; of one request
PRIOR_RATE, PRIOR_ROWS = 0.2, 2.0  # what is assumed of a draft before any was seen, and the rows that outweigh it
OTHERS = 4.0  # rows of a request that outweigh what others had accepted
PROBE_SHARE = 0.005  # of the time goes into trying a k that was not tried for long
PROBE_STEPS, PROBE_AGE, PROBE_PATIENCE = 3, 64, 32  # steps of a try, between tries of one k, and until it is given up


class StepCosts:
    """What decode steps cost by rows and k, in seconds of the machine as it is.

    Machines and contexts drift by more than what one k costs above another, and a k that is not used is not measured.
    So costs are told apart from pace: what a step costs beside others is learnt from the first steps after another k,
    at the pace of those before; what changes later is the pace, and that of all steps. Both are medians of the newest
    measurements. A step that was not measured costs what its number of tokens suggests, between the measured ones;
    before any was measured, all cost the same."""

    def __init__(self) -> None:
        self._recent: dict[tuple[int, int], deque[float]] = {}
        self._cost: dict[tuple[int, int], float] = {}  # at pace 1
        self._paces: deque[float] = deque(maxlen=PACE_STEPS)
        self._pace = 1.0
        self._k, self._steps = -1, 0  # the k of the newest steps, and how many they are
        self._num_steps: Counter[int] = Counter()  # by rows

    def rehearsed(self, rows: int, k: int, seconds: float) -> None:
        """Take in a step that was measured before serving, beside the others and often enough."""
        for _ in range(FEW_STEPS):
            self._learn((rows, k), seconds)

    def record(self, rows: int, k: int, seconds: float) -> None:
        """Take in a step that was served, in their order."""
        self._steps = 1 + self._steps * (k == self._k)
        self._k = k
        self._num_steps[rows] += 1
        is_new = len(self._recent.get((rows, k), ())) < FEW_STEPS
        if is_new or (self._paces and self._steps <= LEARNING_STEPS):
            self._learn((rows, k), seconds / self._pace)
        else:
            self._paces.append(seconds / self._cost[rows, k])
            self._pace = statistics.median(self._paces)

    def _learn(self, step: tuple[int, int], cost: float) -> None:
        recent = self._recent.setdefault(step, deque(maxlen=15))
        recent.append(cost)
        self._cost[step] = statistics.median(recent)

    def at_usual_rows(self, max_draft: int) -> list[float]:
        """The cost of a step for k = 0, 1 ... at the number of rows that occurred most; nothing before any was
        measured."""
        return [self(rows, k) for rows, _ in self._num_steps.most_common(1) for k in range(max_draft + 1)]

    def __call__(self, rows: int, k: int) -> float:
        return self._pace * self._at_pace_1(rows, k)

    def _at_pace_1(self, rows: int, k: int) -> float:
        if (rows, k) in self._cost:
            return self._cost[rows, k]
        if not self._cost:
            return 1.0
        known = sorted((rows * (1 + k), cost) for (rows, k), cost in self._cost.items())
        sizes, costs = [size for size, _ in known], [cost for _, cost in known]
        return float(np.interp(rows * (1 + k), sizes, costs))


class RunningAcceptance:
    """How often the draft at each position was right where all before it were: of each request, as far as it has shown,
    and of all. The newest rows weigh most."""

    def __init__(self, num_slots: int, max_draft: int) -> None:
        self._all, self._own = _Counts((max_draft,), HORIZON), _Counts((num_slots, max_draft), OWN_HORIZON)

    def begin(self, slot: int) -> None:
        """Another request has the slot."""
        self._own.seen[slot] = self._own.right[slot] = 0.0

    def record(self, slots: IntArray, num_matching_drafts: IntArray, visible: int) -> None:
        """Take in how many leading drafts were right, of rows whose first `visible` drafts could be judged."""
        reached = num_matching_drafts[:, None] >= np.arange(visible + 1)
        self._all.add(np.s_[:visible], reached.sum(axis=0))
        self._own.add(np.s_[slots, :visible], reached)

    def expected(self, slots: IntArray) -> list[float]:
        """Expected number of accepted drafts of the rows together, for k = 0, 1, ... A position without experience is
        taken to be like the one before it, and a request without experience like the others."""
        rate, rates = PRIOR_RATE, list[float]()
        for seen, right in zip(self._all.seen.tolist(), self._all.right.tolist(), strict=True):
            rate = (right + PRIOR_ROWS * rate) / (seen + PRIOR_ROWS)
            rates.append(rate)
        seen, right = self._own.seen[slots], self._own.right[slots]
        own = (right + OTHERS * np.array(rates)) / (seen + OTHERS)
        return [0.0, *own.cumprod(axis=1).sum(axis=0).cumsum().tolist()]


class _Counts:
    """Drafts that were judged, and of these the right ones, which fade with a horizon."""

    def __init__(self, shape: tuple[int, ...], horizon: float) -> None:
        self.seen, self.right, self._horizon = np.zeros(shape), np.zeros(shape), horizon

    def add(self, where: Any, reached: npt.NDArray[Any]) -> None:
        """`reached[..., i]` counts rows whose first i drafts were right."""
        seen, right = reached[..., :-1], reached[..., 1:]
        decay = self._horizon / (self._horizon + seen)
        self.seen[where] = self.seen[where] * decay + seen
        self.right[where] = self.right[where] * decay + right


class AdaptiveK:
    """Chooses k among `tiers` (ascending). With one tier it is that one, and nothing is measured.

    `pad` gives the rows of the captured step that serves a batch.
    """

    def __init__(self, tiers: Sequence[int], num_slots: int, pad: Callable[[int], int]) -> None:
        self.tiers = tuple(tiers)
        self.costs = StepCosts()
        self.acceptance = RunningAcceptance(num_slots, self.tiers[-1])
        self._pad = pad
        self._current = self.tiers[-1]
        self._clock, self._used = 0, dict.fromkeys(self.tiers, 0)
        self._credit = 0.0  # seconds that may be lost on trying
        self._probe, self._steps_left, self._patience = self._current, 0, 0

    @property
    def chooses(self) -> bool:
        return len(self.tiers) > 1

    def choose(self, num_rows: int, speculating: IntArray) -> int:
        """k for a step of `num_rows`, of which those in the slots `speculating` accept drafts."""
        if not self.chooses or not num_rows:
            return self._current
        rows, expected = self._pad(num_rows), self.acceptance.expected(speculating)
        rate = {k: (num_rows + expected[k]) / self.costs(rows, k) for k in self.tiers}
        best = max(self.tiers, key=rate.__getitem__)
        if rate[best] > (1 + MARGIN * (best > self._current)) * rate[self._current]:
            self._current = best
        return self._probing(rows, rate)

    def _probing(self, rows: int, rate: dict[int, float]) -> int:
        """The current k, or now and then another one, as long as the time this may lose stays within its share."""
        if self._steps_left and self._patience:
            self._patience -= 1
            return self._probe
        current = self._current
        self._credit += PROBE_SHARE * self.costs(rows, current)
        oldest = min(self.tiers, key=lambda k: (k == current, self._used[k]))
        seconds = PROBE_STEPS * self.costs(rows, oldest)
        loss = seconds * max(0.0, 1 - rate[oldest] / rate[current])
        if self._clock - self._used[oldest] < PROBE_AGE or loss > self._credit:
            return current
        self._credit = min(self._credit - loss, seconds)  # what was not needed is not saved up for ever
        self._probe, self._steps_left, self._patience = oldest, PROBE_STEPS, PROBE_PATIENCE
        return oldest

    def launched(self, k: int) -> None:
        """A step with this k was launched."""
        self._clock += 1
        self._used[k] = self._clock
        self._steps_left -= self._steps_left > 0 and k == self._probe

    def answered(
        self, num_rows: int, k: int, seconds: float | None, slots: IntArray, num_matching_drafts: IntArray, visible: int
    ) -> None:
        """Learn from an answered step of `num_rows`: its device time, if nothing else ran in it, and the drafts of the
        rows that speculate, see `RunningAcceptance.record`."""
        if not self.chooses:
            return
        if seconds is not None:
            self.costs.record(self._pad(num_rows), k, seconds)
        if visible:
            self.acceptance.record(slots, num_matching_drafts, visible)


def step_towards(tiers: Sequence[int], current: int, wanted: int) -> int:
    """The tier next to `current` in the direction of `wanted`."""
    here, there = tiers.index(current), tiers.index(wanted)
    return tiers[here + (there > here) - (there < here)]
