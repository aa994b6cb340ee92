"""How the tokens of the rows of a launch are drawn, by the target and by a drafter that draws as it would."""

from __future__ import annotations

from typing import NamedTuple

import torch

from graphspec.records.sampling_params import KindParts
from graphspec.sampling.keyed_sampling import sample
from graphspec.sampling.processors import Context, process
from graphspec.sampling.rows import ProcessorRows, SamplingRows


class RowSampler(NamedTuple):
    """Parameters of R rows, and the kind that serves all of them."""

    base: str  # see `sampling.sample`
    params: SamplingRows
    processors: ProcessorRows | None  # None: no row of this kind has any

    @staticmethod
    def of(kind: KindParts, sampling: SamplingRows, processors: ProcessorRows, slots: torch.Tensor) -> RowSampler:
        """Of the rows in `slots`, from what all slots have."""
        params = sampling if kind.base == "greedy" else sampling.rows(slots)  # greedy reads none
        return RowSampler(kind.base, params, processors.rows(slots) if kind.processors else None)

    def process(self, logits: torch.Tensor, context: Context) -> torch.Tensor:
        """`logits` `[R, Q, V]` of the tokens that follow the Q contexts, as the rules of their requests leave them."""
        return logits if self.processors is None else process(logits, context, self.processors)

    def draw(self, processed: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Token ids `[R, Q]` for the absolute positions `places`. The target's noise at each of them, so processed
        logits that are nearly the target's nearly always give the target's token."""
        return sample(processed, places, self.params, self.base)
