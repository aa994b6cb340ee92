"""Acceptance explained: where drafts were lost, and what another k would have given. No torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)

Counts = npt.NDArray[np.int64]

# Why a verified draft was not delivered. Each has exactly one cause, the first that holds in this order.
CAUSES = (
    "past the limit",  # stands where max_tokens or max_model_len has ended the text
    "past the stop",  # accepted, and cut by a stop rule before it
    "after a rejection",  # an earlier draft of the row was rejected
    "filler",  # the drafter had nothing to say
    "forbidden",  # by a rule of the request: bad words, allowed ids, min_tokens
    "sampled away",  # the likeliest token, but the noise of the request chose another
    "differs",  # the target finds another token likelier
)

# An alarm compares windows of so many verified rows with everything before them, and reports a position whose rate
# has fallen below this share of its history.
WINDOW, COLLAPSE = 500, 0.5


class RejectionRows(NamedTuple):
    """About the first rejected draft of each of N rows, see `explain.rejection`."""

    ranks: Counts  # [N]
    gaps: npt.NDArray[np.float32]  # [N]
    filler: npt.NDArray[np.bool_]  # [N]

    def take(self, rows: Counts | npt.NDArray[np.bool_] | slice) -> RejectionRows:
        return RejectionRows(self.ranks[rows], self.gaps[rows], self.filler[rows])


class Loss(NamedTuple):
    """Of drafts that the target found less likely than another token."""

    mean_rank: float
    mean_gap: float  # probability of the likeliest token minus that of the draft


@dataclass(frozen=True)
class AcceptanceReport:
    """`lost[cause][i]` counts drafts at position i; with `delivered[i]` they add up to all verified drafts."""

    num_drafts: int
    delivered: list[int]
    lost: dict[str, list[int]]
    differs: Loss
    tokens_per_step: list[float]  # what k = 0, 1, ... up to the k in use would have emitted per row and step
    alarms: list[str]  # positions whose acceptance collapsed against their own history

    def best_k(self, step_costs: Sequence[float]) -> int:
        """The k with most tokens per cost, given the cost of a step for k = 0, 1, ... in any unit."""
        gains = [tokens / cost for tokens, cost in zip(self.tokens_per_step, step_costs, strict=False)]
        return gains.index(max(gains))


class AcceptanceLog:
    """Counts of all rows, or of those of one request. What `watch` notices is logged as a warning."""

    def __init__(self, num_draft: int, watch: CollapseWatch | None = None) -> None:
        self._watch, self._alarms = watch, list[str]()
        self._lost: Counts = np.zeros((len(CAUSES), num_draft), np.int64)
        self._delivered: Counts = np.zeros(num_draft, np.int64)
        self._verified: Counts = np.zeros(num_draft, np.int64)  # rows that verified the draft at each position
        self._accepted: Counts = np.zeros(num_draft, np.int64)  # those that accepted it, before any cut
        self._rank_sum = self._gap_sum = 0.0

    def record(self, rows: RejectionRows, accepted: Counts, delivered: Counts, room: Counts, num_draft: int) -> None:
        """Count decode rows of a step with `num_draft`: drafts accepted before the stop rules and delivered after them,
        and the tokens that were left to the limit of each."""
        index = np.arange(num_draft)
        cause = classify(rows, accepted, delivered, room, index)
        for number in range(len(CAUSES)):
            self._lost[number, :num_draft] += (cause == number).sum(axis=0)
        self._delivered[:num_draft] += (index < delivered[:, None]).sum(axis=0)
        self._verified[:num_draft] += len(accepted)
        self._accepted[:num_draft] += (index < accepted[:, None]).sum(axis=0)
        differs = (cause == CAUSES.index("differs")).any(axis=1)
        self._rank_sum += float(rows.ranks[differs].sum())
        self._gap_sum += float(rows.gaps[differs].sum())
        for alarm in () if self._watch is None else self._watch.observe(accepted):
            log.warning(alarm)
            self._alarms.append(alarm)

    def report(self) -> AcceptanceReport:
        lost = {name: self._lost[number].tolist() for number, name in enumerate(CAUSES)}
        num_differs = max(1, sum(lost["differs"]))
        gains = self._accepted / np.maximum(1, self._verified)
        tokens = [1.0, *(1.0 + gains.cumsum()).tolist()]
        return AcceptanceReport(
            num_drafts=int(self._verified.max(initial=0)),
            delivered=self._delivered.tolist(),
            lost=lost,
            differs=Loss(self._rank_sum / num_differs, self._gap_sum / num_differs),
            tokens_per_step=tokens,
            alarms=list(self._alarms),
        )


def classify(rows: RejectionRows, accepted: Counts, delivered: Counts, room: Counts, index: Counts) -> Counts:
    """The number of the cause of every draft `[N, k]`, -1 for delivered ones."""
    number = {name: i for i, name in enumerate(CAUSES)}
    own = np.where(rows.ranks == 1, number["sampled away"], number["differs"])
    own = np.where(rows.ranks == 0, number["forbidden"], own)
    own = np.where(rows.filler, number["filler"], own)
    place, accepted, delivered, room = index[None, :], accepted[:, None], delivered[:, None], room[:, None]
    cause = np.where(place == accepted, own[:, None], number["after a rejection"])
    cause = np.where(place < accepted, number["past the stop"], cause)
    cause = np.where(place >= room, number["past the limit"], cause)
    return np.where(place < delivered, -1, cause).astype(np.int64)


class CollapseWatch:
    """Compares the acceptance of every position in the newest window of rows with its own history."""

    def __init__(self, num_draft: int) -> None:
        self._before, self._window = np.zeros(num_draft, np.int64), np.zeros(num_draft, np.int64)
        self._rows_before = self._rows = 0

    def observe(self, accepted: Counts) -> list[str]:
        """Take in rows; returns what has collapsed, in words, whenever a window is full."""
        self._window += (accepted[:, None] > np.arange(len(self._window))).sum(axis=0)
        self._rows += len(accepted)
        if self._rows < WINDOW:
            return []
        alarms = []
        if self._rows_before:
            history, now = self._before / self._rows_before, self._window / self._rows
            for position in np.flatnonzero((history >= 0.1) & (now < COLLAPSE * history)).tolist():
                alarms.append(
                    f"acceptance of draft {position} fell to {now[position]:.2f} in the last {self._rows} rows; "
                    f"it was {history[position]:.2f} before"
                )
        self._before += self._window
        self._rows_before += self._rows
        self._window[:] = 0
        self._rows = 0
        return alarms
