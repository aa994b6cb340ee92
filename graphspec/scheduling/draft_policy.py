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

MARGIN = 0.05  # a larger k is taken only if its expected throughput is better by this share; a smaller one at once
LEARNING_STEPS = 8  # of a k that was just chosen, from which its cost is learnt
SLOWDOWN_STEPS = 9  # whose median is how slow the machine is now
FEW_STEPS = 3  # the first of a k at a number of rows, which are always learnt from
HORIZON, OWN_HORIZON = 64.0, 32.0  # rows after which what was observed counts for about half; of one request alone
PRIOR_RATE, PRIOR_ROWS = 0.2, 2.0  # acceptance assumed before any draft was seen, and the rows that outweigh it
OTHERS = 4.0  # rows of a request that count as much as the acceptance of all others
PROBE_SHARE = 0.005  # of the time may be lost on trying a k that was not used for long
PROBE_STEPS, PROBE_AGE, PROBE_PATIENCE = 3, 64, 32  # steps of a try, between tries of one k, until a try is given up


class StepCosts:
    """What decode steps cost by rows and k, in seconds of the machine as it is.

    The machine and the contexts change by more than what one k costs above another, and a k that is not used is not
    measured. So a time is the product of two: the nominal cost of a step, which is learnt from the first steps after k
    changed, and the slowdown of the machine, which is learnt from all later ones and applies to every step alike. Both
    are medians of the newest measurements. The cost of a step that was not measured is interpolated by its number of
    tokens between those that were; before any was measured, all cost the same."""

    def __init__(self) -> None:
        self._recent: dict[tuple[int, int], deque[float]] = {}
        self._cost: dict[tuple[int, int], float] = {}  # at slowdown 1
        self._slowdowns: deque[float] = deque(maxlen=SLOWDOWN_STEPS)
        self._slowdown = 1.0
        self._k, self._steps = -1, 0  # the k of the newest steps, and how many they are
        self._num_steps: Counter[int] = Counter()  # by rows

    def record_profiled(self, rows: int, k: int, seconds: float) -> None:
        """Take in a step that was profiled before serving, when all were measured in turns."""
        for _ in range(FEW_STEPS):
            self._learn((rows, k), seconds)

    def record(self, rows: int, k: int, seconds: float) -> None:
        """Take in the next step that was served."""
        self._steps = 1 + self._steps * (k == self._k)
        self._k = k
        self._num_steps[rows] += 1
        is_new = len(self._recent.get((rows, k), ())) < FEW_STEPS
        if is_new or (self._slowdowns and self._steps <= LEARNING_STEPS):
            self._learn((rows, k), seconds / self._slowdown)
        else:
            self._slowdowns.append(seconds / self._cost[rows, k])
            self._slowdown = statistics.median(self._slowdowns)

    def _learn(self, step: tuple[int, int], cost: float) -> None:
        recent = self._recent.setdefault(step, deque(maxlen=15))
        recent.append(cost)
        self._cost[step] = statistics.median(recent)

    def at_usual_rows(self, max_draft: int) -> list[float]:
        """The cost of a step for k = 0, 1 ... at the number of rows that occurred most; nothing before any was
        measured."""
        return [self(rows, k) for rows, _ in self._num_steps.most_common(1) for k in range(max_draft + 1)]

    def __call__(self, rows: int, k: int) -> float:
        return self._slowdown * self._nominal(rows, k)

    def _nominal(self, rows: int, k: int) -> float:
        if (rows, k) in self._cost:
            return self._cost[rows, k]
        if not self._cost:
            return 1.0
        known = sorted((rows * (1 + k), cost) for (rows, k), cost in self._cost.items())
        sizes, costs = [size for size, _ in known], [cost for _, cost in known]
        return float(np.interp(rows * (1 + k), sizes, costs))


class RunningAcceptance:
    """How often the draft at each position was right, given that all before it were: for each request, and for all of
    them together. The newest rows weigh most."""

    def __init__(self, num_slots: int, max_draft: int) -> None:
        self._all, self._own = _Counts((max_draft,), HORIZON), _Counts((num_slots, max_draft), OWN_HORIZON)

    def begin(self, slot: int) -> None:
        """A new request has the slot."""
        self._own.seen[slot] = self._own.right[slot] = 0.0

    def record(self, slots: IntArray, num_matching_drafts: IntArray, visible: int) -> None:
        """Take in how many leading drafts were right, of rows whose first `visible` drafts could be judged."""
        reached = num_matching_drafts[:, None] >= np.arange(visible + 1)
        self._all.add(np.s_[:visible], reached.sum(axis=0))
        self._own.add(np.s_[slots, :visible], reached)

    def expected(self, slots: IntArray) -> list[float]:
        """Expected number of accepted drafts of the rows together, for k = 0, 1, ... A position that was
        never judged is taken to be like the one before it, and a new request like all others."""
        rate, rates = PRIOR_RATE, list[float]()
        for seen, right in zip(self._all.seen.tolist(), self._all.right.tolist(), strict=True):
            rate = (right + PRIOR_ROWS * rate) / (seen + PRIOR_ROWS)
            rates.append(rate)
        seen, right = self._own.seen[slots], self._own.right[slots]
        own = (right + OTHERS * np.array(rates)) / (seen + OTHERS)
        return [0.0, *own.cumprod(axis=1).sum(axis=0).cumsum().tolist()]


class _Counts:
    """Drafts that were judged, and those of them that were right; older ones fade away with a horizon."""

    def __init__(self, shape: tuple[int, ...], horizon: float) -> None:
        self.seen, self.right, self._horizon = np.zeros(shape), np.zeros(shape), horizon

    def add(self, where: Any, reached: npt.NDArray[Any]) -> None:
        """`reached[..., i]` counts rows whose first i drafts were right."""
        seen, right = reached[..., :-1], reached[..., 1:]
        decay = self._horizon / (self._horizon + seen)
        self.seen[where] = self.seen[where] * decay + seen
        self.right[where] = self.right[where] * decay + right


class AdaptiveK:
    """Chooses k among `tiers` (ascending). With a single tier nothing is measured or chosen.

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
        self._credit = min(self._credit - loss, seconds)  # unused credit does not add up for ever
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
