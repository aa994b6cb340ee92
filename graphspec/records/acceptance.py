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

# Why a verified draft was not delivered. Each has exactly one cause, the first of these that applies.
CAUSES = (
    "past the limit",  # max_tokens or max_model_len has ended the text before it
    "past the stop",  # accepted, but a stop rule has ended the text before it
    "after a rejection",  # an earlier draft of the row was rejected
    "filler",  # the drafter had no proposal for this position
    "forbidden",  # by a rule of the request: bad words, allowed ids, min_tokens
    "sampled away",  # the most likely token, but the noise of the request chose another
    "differs",  # the target finds another token more likely
)

# A series raises an alarm if the rate of its newest window falls below a share of the rate of all windows before,
# unless that was too low to tell.
WINDOW, COLLAPSE, WORTH_WATCHING = 500, 0.5, 0.1  # verified rows; share; lowest rate before


class RejectionRows(NamedTuple):
    """The first rejected draft of each of N rows, see `sampling.rejection.rejection`."""

    ranks: Counts  # [N]
    gaps: npt.NDArray[np.float32]  # [N]
    filler: npt.NDArray[np.bool_]  # [N]

    def take(self, rows: Counts | npt.NDArray[np.bool_] | slice) -> RejectionRows:
        return RejectionRows(self.ranks[rows], self.gaps[rows], self.filler[rows])


class VerifiedRows(NamedTuple):
    """N decode rows of one step that speculate."""

    rejections: RejectionRows
    accepted: Counts  # [N] drafts accepted, before the stop rules cut the row
    delivered: Counts  # [N] drafts accepted, after that cut
    room: Counts  # [N] tokens the request could still emit before its limit
    context: Counts  # [N] tokens with KV before the step

    def take(self, rows: slice) -> VerifiedRows:
        return VerifiedRows(self.rejections.take(rows), *(field[rows] for field in self[1:]))


class Loss(NamedTuple):
    """About the drafts that were rejected because the target finds another token more likely."""

    mean_rank: float
    mean_gap: float  # probability of the most likely token minus that of the draft


@dataclass(frozen=True)
class AcceptanceReport:
    """`lost[cause][i]` counts drafts at position i; with `delivered[i]` they add up to all verified drafts."""

    num_drafts: int
    delivered: list[int]
    lost: dict[str, list[int]]
    differs: Loss
    tokens_per_step: list[float]  # what k = 0, 1, ... up to the k in use would have emitted per row and step
    alarms: list[str]  # positions and lengths of context whose acceptance collapsed against their own history

    def best_k(self, step_costs: Sequence[float]) -> int:
        """The k with most tokens per cost, given the cost of a step for k = 0, 1, ... in any unit."""
        gains = [tokens / cost for tokens, cost in zip(self.tokens_per_step, step_costs, strict=False)]
        return gains.index(max(gains))


class AcceptanceLog:
    """Counts for all rows, or for those of one request. Alarms of `watch` are logged as warnings."""

    def __init__(self, num_draft: int, watch: CollapseWatch | None = None) -> None:
        self._watch, self._alarms = watch, list[str]()
        self._lost: Counts = np.zeros((len(CAUSES), num_draft), np.int64)
        self._delivered: Counts = np.zeros(num_draft, np.int64)
        self._verified: Counts = np.zeros(num_draft, np.int64)  # rows that verified the draft at each position
        self._accepted: Counts = np.zeros(num_draft, np.int64)  # those that accepted it, before any cut
        self._rank_sum = self._gap_sum = 0.0

    def record(self, rows: VerifiedRows, num_draft: int) -> None:
        """Count decode rows of a step with `num_draft` drafts."""
        index, (why, accepted, delivered, room, _) = np.arange(num_draft), rows
        cause = classify(why, accepted, delivered, room, index)
        for number in range(len(CAUSES)):
            self._lost[number, :num_draft] += (cause == number).sum(axis=0)
        self._delivered[:num_draft] += (index < delivered[:, None]).sum(axis=0)
        self._verified[:num_draft] += len(accepted)
        self._accepted[:num_draft] += (index < accepted[:, None]).sum(axis=0)
        differs = (cause == CAUSES.index("differs")).any(axis=1)
        self._rank_sum += float(why.ranks[differs].sum())
        self._gap_sum += float(why.gaps[differs].sum())
        for alarm in () if self._watch is None else self._watch.observe(rows, num_draft):
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
    """Compares the acceptance in the newest window of rows with everything before it, for several series of rows."""

    def __init__(self) -> None:
        self._series: dict[str, _Series] = {}

    def observe(self, rows: VerifiedRows, num_draft: int) -> list[str]:
        """Take in rows, in one series per draft position and one per power of two of their context lengths. Returns one
        sentence per series that has collapsed."""
        found = [
            self.add(f"draft {place}", float((rows.accepted > place).sum()), len(rows.accepted))
            for place in range(num_draft)
        ]
        bucket = np.frexp(rows.context.astype(np.float64))[1]  # b for 2 ** (b - 1) .. 2 ** b - 1
        for b in np.unique(bucket).tolist():
            accepted = rows.accepted[bucket == b]
            name = f"drafts behind {2**b // 2} to {2**b - 1} tokens"
            found.append(self.add(name, float(accepted.sum()) / num_draft, len(accepted)))
        return [alarm for alarm in found if alarm is not None]

    def add(self, name: str, hits: float, num_rows: int) -> str | None:
        """Take in rows of one series. Returns a sentence if they complete a window in which acceptance collapsed."""
        series = self._series.setdefault(name, _Series())
        series.hits += hits
        series.rows += num_rows
        if series.rows < WINDOW:
            return None
        now, rows = series.hits / series.rows, series.rows
        history = series.hits_before / series.rows_before if series.rows_before else 0.0
        series.hits_before += series.hits
        series.rows_before += rows
        series.hits, series.rows = 0.0, 0
        if history < WORTH_WATCHING or now >= COLLAPSE * history:
            return None
        return f"acceptance of {name} fell to {now:.2f} in the last {rows} rows; it was {history:.2f} before"


@dataclass
class _Series:
    """Rows of the window that is being filled, those of all windows before it, and their accepted drafts."""

    hits: float = 0.0
    rows: int = 0
    hits_before: float = 0.0
    rows_before: int = 0
