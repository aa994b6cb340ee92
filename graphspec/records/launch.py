"""The records that pass between scheduler, runner and engine. No torch.

Their words (k, bonus, emitted, placeholder, epoch ...) are defined in the glossary of docs/ARCHITECTURE.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graphspec.records.acceptance import RejectionRows
from graphspec.records.outputs import Logprob, TokenLogprobs
from graphspec.records.sampling_params import SamplingParams
from graphspec.records.token_rules import TokenRules

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
PageTable = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


def placeholders_of_decode(num_draft: int) -> int:
    """Output positions a decode row reserves in one step. Static: never shortened, not even near the end."""
    return 1 + num_draft


@dataclass(frozen=True)
class Admission:
    """A request takes a slot: the device state of the slot is initialised from this before anything else of the
    step. `token_ids` is everything known, prompt and settled output; the first `num_prompt` are the prompt."""

    slot: int
    token_ids: npt.NDArray[np.int32]
    num_prompt: int
    params: SamplingParams
    rules: TokenRules
    seed: int
    index: int
    salt: int  # the cache salt of the request as a number, see `page_pool.salt_word`


@dataclass(frozen=True, eq=False)
class PrefillRows:
    """Prompt chunks of one launch, C rows. Host lengths of prompts are exact."""

    slots: IntArray  # [C]
    epochs: IntArray  # [C]
    starts: IntArray  # [C] position of the first token of the chunk
    lengths: IntArray  # [C]
    final: BoolArray  # [C] the chunk ends the prompt, so it samples the first token
    scored_to: IntArray  # [C] positions below this return the log-probability of the token after them
    page_table: PageTable  # [C, P]
    sampler: str

    @property
    def final_slots(self) -> IntArray:
        """Slots of the final chunks."""
        return self.slots[self.final]

    @property
    def num_scored(self) -> IntArray:
        """Positions of each chunk that return log-probabilities, the leading ones. [C]"""
        scored: IntArray = np.clip(self.scored_to - self.starts, 0, self.lengths)
        return scored


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
    """One launch. Complete at birth: what the launch knew is kept with it until it is answered.

    `catch_up` are chunks of tokens that only the drafter has not read yet; a launch has them or prompt chunks.
    `after_idle`: there were no requests just before, so the time the device waited is not the fault of the host.
    """

    step: int
    admissions: tuple[Admission, ...]
    prefill: PrefillRows | None
    decode: DecodeRows | None
    num_draft_next: int
    catch_up: PrefillRows | None = None
    after_idle: bool = False


class LogprobRows(NamedTuple):
    """Log-probabilities at N places, or at [N, W] positions of rows; T alternatives, most likely first."""

    chosen: FloatArray  # [N, W] of the token that stands there
    ranks: IntArray  # [N, W] of that token; 1 is the most likely
    top_ids: IntArray  # [N, W, T]
    top: FloatArray  # [N, W, T]

    def take(self, rows: IntArray | BoolArray | slice | int) -> LogprobRows:
        return LogprobRows(self.chosen[rows], self.ranks[rows], self.top_ids[rows], self.top[rows])

    def entries(self, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
        """What a user gets for `token_ids`, which stand at the first N places: each token and the `num_top` best."""
        count = len(token_ids)
        chosen, ranks = self.chosen[:count].tolist(), self.ranks[:count].tolist()
        top_ids, top = self.top_ids[:count, :num_top].tolist(), self.top[:count, :num_top].tolist()
        found = []
        for i, token in enumerate(token_ids):
            best = {t: Logprob(value, rank) for rank, (t, value) in enumerate(zip(top_ids[i], top[i], strict=True), 1)}
            found.append({token: Logprob(chosen[i], ranks[i])} | {t: own for t, own in best.items() if t != token})
        return found


@dataclass(frozen=True, eq=False)
class RowResults:
    """Answers of the sampling rows of one launch, in row order.

    A step of k drafts samples at 1 + k positions, so it also tells whether a draft k + 1 of the slot would have been
    right: `num_matching_drafts` counts up to that one, `num_emitted` only drafts that were verified.
    """

    num_emitted: IntArray  # [N]
    num_healthy: IntArray  # [N] leading positions with a legal input id and finite logits
    computed: IntArray  # [N] tokens with KV before the step, as the device knew it
    num_matching_drafts: IntArray  # [N] leading drafts of the slot that the target would sample too, see above
    tokens: IntArray  # [N, W], -1 after the emitted ones
    logprobs: LogprobRows | None = None  # [N, W] of the emitted tokens
    rejections: RejectionRows | None = None  # of decode rows, if acceptance is to be explained

    def take(self, rows: BoolArray) -> RowResults:
        return RowResults(
            self.num_emitted[rows],
            self.num_healthy[rows],
            self.computed[rows],
            self.num_matching_drafts[rows],
            self.tokens[rows],
            None if self.logprobs is None else self.logprobs.take(rows),
            None if self.rejections is None else self.rejections.take(rows),
        )


@dataclass(frozen=True, eq=False)
class StepResult:
    """The answer to a StepPlan, read back from the device."""

    prefill: RowResults | None  # one column; rows of non-final chunks hold nothing
    decode: RowResults | None
    off_graph: str = ""  # why the decode step replayed no captured graph
    seconds: float | None = None  # device time, of a launch that was a decode step and nothing else
    prompt_logprobs: LogprobRows | None = None  # of all scored positions of the chunks, in order
