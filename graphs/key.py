"""Which graph a decode step uses: one function makes the key, at capture and at lookup."""

from __future__ import annotations

from bisect import bisect_left
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
