"""The records that pass between scheduler, runner and engine, and the glossary of acceptance. No torch.

num_draft      k, draft tokens per row in a step
num_accepted   0..k, the drafts that were kept
bonus          the one token the target adds after the accepted drafts, always exactly one
num_emitted    num_accepted + 1
placeholder    an output position that is scheduled but not yet answered: 1 + k per decode row, 1 for a final
               prefill chunk, 0 for any other chunk
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphspec.request import SamplingParams

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
PageTable = npt.NDArray[np.int32]


def placeholders_of_decode(num_draft: int) -> int:
    """Output positions a decode row reserves in one step. Static: never shortened, not even near the end."""
    return 1 + num_draft


@dataclass(frozen=True)
class Admission:
    """A request takes a slot: the device state of the slot is initialised from this before anything else of the
    step. `token_ids` is everything known, prompt and settled output."""

    slot: int
    token_ids: npt.NDArray[np.int32]
    params: SamplingParams
    seed: int


@dataclass(frozen=True, eq=False)
class PrefillRows:
    """Prompt chunks of one launch, C rows. Host lengths of prompts are exact."""

    slots: IntArray  # [C]
    epochs: IntArray  # [C]
    starts: IntArray  # [C] position of the first token of the chunk
    lengths: IntArray  # [C]
    final: BoolArray  # [C] the chunk ends the prompt, so it samples the first token
    page_table: PageTable  # [C, P]
    sampler: str


@dataclass(frozen=True, eq=False)
class DecodeRows:
    """Decode rows of one launch: each carries exactly 1 + num_draft positions.

    `computed_bound` is all the scheduler can say about computed-token counts: an upper bound, as if every draft in
    flight were accepted. About draft ids it can say nothing. Neither is sent to the device: the first part of the
    step puts the truth of the slots in their place.
    """

    slots: IntArray  # [N]
    epochs: IntArray  # [N]
    computed_bound: IntArray  # [N]
    page_table: PageTable  # [N, P]
    num_draft: int
    sampler: str


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One launch. Complete at birth: what the launch knew is kept with it until it is answered."""

    step: int
    admissions: tuple[Admission, ...]
    prefill: PrefillRows | None
    decode: DecodeRows | None


@dataclass(frozen=True, eq=False)
class RowResults:
    """Answers of the sampling rows of one launch, in row order."""

    num_emitted: IntArray  # [N]
    num_healthy: IntArray  # [N] leading positions with a legal input id and finite logits
    computed: IntArray  # [N] tokens with KV before the step, as the device knew it
    tokens: IntArray  # [N, W], -1 after the emitted ones


@dataclass(frozen=True, eq=False)
class StepResult:
    """The answer to a StepPlan, read back from the device."""

    prefill: RowResults | None  # one column; rows of non-final chunks hold nothing
    decode: RowResults | None
    off_graph: str = ""  # why the decode step replayed no captured graph
