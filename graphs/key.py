"""Which graph a decode step uses: one function makes the key, at capture and at lookup."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple


class GraphKey(NamedTuple):
    """Identity of a captured step.

    `kind` comes from the state of the requests, never from a shape: a prefill chunk that happens to be 1 + k tokens
    long is not a decode. `num_draft` is k of the drafts consumed, `num_draft_next` k of the drafts proposed.
    """

    kind: str
    rows: int
    num_draft: int
    num_draft_next: int
    sampler: str


@dataclass(frozen=True)
class BucketLadder:
    """The row counts that exist as graphs, ascending; the last rung is the maximum."""

    rungs: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.rungs or self.rungs[0] < 1 or any(a >= b for a, b in zip(self.rungs, self.rungs[1:], strict=False)):
            raise ValueError(f"a ladder needs ascending positive rungs, got {self.rungs}")

    @staticmethod
    def up_to(maximum: int) -> BucketLadder:
        """1, 2, 3, 4, 6, 8, 12, 16, 24, 32 ... and `maximum` itself: at most half of a launch is padding."""
        rungs, step = {maximum}, 1
        while step < maximum:
            rungs.update(r for r in (step, step + step // 2) if r < maximum)
            step *= 2
        return BucketLadder(tuple(sorted(rungs)))

    def pad(self, rows: int) -> int:
        """The smallest rung that holds `rows`. Raises ValueError above the last rung."""
        if not 1 <= rows <= self.rungs[-1]:
            raise ValueError(f"{rows} rows do not fit the ladder 1..{self.rungs[-1]}")
        return self.rungs[bisect_left(self.rungs, rows)]


@dataclass(frozen=True)
class GraphPlan:
    """Every key that a step can have: a batch of 1 to `max_batch` rows, each sampler, and each pair of k in `drafts`,
    the drafts that a step consumes and those that it proposes.

    Raises ValueError, with the list, for batch sizes that no rung holds and for rungs that no batch reaches.
    """

    ladder: BucketLadder
    max_batch: int
    drafts: tuple[tuple[int, int], ...]
    samplers: tuple[str, ...]

    def __post_init__(self) -> None:
        last = self.ladder.rungs[-1]
        if holes := list(range(last + 1, self.max_batch + 1)):
            raise ValueError(f"no graph holds {_names(holes)} rows: the last rung must be {self.max_batch}, not {last}")
        if unreachable := [rung for rung in self.ladder.rungs if rung > self.max_batch]:
            raise ValueError(f"no batch reaches the rungs {_names(unreachable)}: at most {self.max_batch} rows run")

    def key(self, batch: int, num_draft: int, num_draft_next: int, sampler: str) -> GraphKey:
        """The key of a step of `batch` rows, for capture and for lookup."""
        return GraphKey("decode", self.ladder.pad(batch), num_draft, num_draft_next, sampler)

    def all_keys(self) -> list[GraphKey]:
        """All of them, largest batch first: smaller graphs then find their memory in the pool of larger ones."""
        return self._keys(reversed(self.ladder.rungs))

    def check(self, captured: Collection[object]) -> None:
        """Raise ValueError, with the list, if a step could have a key that is not in `captured`, or if no step can
        have a key that is."""
        possible = set(self._keys(range(1, self.max_batch + 1)))
        if missing := [key for key in self.all_keys() if key in possible and key not in captured]:
            raise ValueError(f"no graph was captured for {_names(missing)}")
        if unreachable := [key for key in captured if key not in possible]:
            raise ValueError(f"no step can ask for the graphs {_names(unreachable)}")

    def _keys(self, batches: Iterable[int]) -> list[GraphKey]:
        return [self.key(batch, *pair, s) for batch in batches for pair in self.drafts for s in self.samplers]


def _names(items: Collection[object]) -> str:
    return ", ".join(map(str, items))
