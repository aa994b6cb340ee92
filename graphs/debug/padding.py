"""What padding to a ladder of row counts costs."""

from __future__ import annotations

from dataclasses import dataclass

from graphs.key import BucketLadder


@dataclass(frozen=True)
class BatchSize:
    """How a batch of one size is served."""

    batch: int
    rows: int  # of the graph that serves it
    positions: int  # that this graph computes
    padding: float  # share of its rows that compute nothing anybody wants


def batch_sizes(ladder: BucketLadder, max_batch: int, row_width: int = 1) -> list[BatchSize]:
    """Every batch size up to `max_batch`, for rows of `row_width` positions."""
    padded = ((batch, ladder.pad(batch)) for batch in range(1, max_batch + 1))
    return [BatchSize(batch, rows, rows * row_width, 1 - batch / rows) for batch, rows in padded]
