"""What a drafter is: what it is told, where it keeps state, and what it answers.

In the stream order of one launch:

    prefill    of packed chunks of prompts, behind the target's forward over them; not captured
    propose    behind the update of the slots, for the rows of the launch: in a decode step as the last captured part,
               and after a prefill, not captured, with the one token that final chunks emitted

So a drafter sees every token of a request exactly once, in order, in the launch that made it known: prompt tokens in
`prefill` (those in cached pages are skipped), emitted ones in `propose`. Everything here is on the device, has static
shapes inside `propose` and reads nothing back.

State lives in tensors whose leading axis is pages, slots or entries that all requests share, see `DrafterBuffers`.

- By page: content of a place may depend on the tokens up to it only. Then it is as shareable as the target's KV, and
  the page pool, the prefix cache, preemption and the fence of pages hold for it as they are: a cached prefix is worth
  to the drafter what it is worth to the target. Such a drafter sets `reads_prompt`, so that no request joins decoding
  before its last prompt token has gone through `prefill`.
- By slot: it starts anew with a prefill, and a cached prefix is worth nothing to it. `DraftInputs.history` still has
  all tokens.
- Shared: it outlives requests and is reset by nobody. Every row may write it in every step, so what a step leaves must
  not depend on the order in which the device happens to write, and padding rows write the last entry only, the scratch
  entry, which no real row reads. What is found there must be as private as a cached prefix: `salts` are for that.

A learned head (EAGLE and its kin) names the target's layers it reads in `hidden_layers`. `hidden[i]` belongs to the
position just before that of `tokens[i]`, which is the pair such a head takes: it writes its KV at the place of the
token. The first token after a cached prefix lacks the state before it, since the target did not compute that position
again; a head keeps the states of the last place of every page in a paged buffer, or goes without this one pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from attention import AttnInputs, Bucket
from graphspec.sampling.row_sampler import RowSampler


@dataclass(frozen=True)
class PromptChunks:
    """C packed chunks of T tokens that the target has just computed."""

    slots: torch.Tensor  # [T] int64
    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    paged: AttnInputs
    hidden: tuple[torch.Tensor, ...]  # [T, D] each, at these positions
    salts: torch.Tensor  # [T] int64, see `DraftInputs`


@dataclass(frozen=True)
class DraftInputs:
    """What a step has made known about R rows.

    `tokens[r, i]` stands at position `start[r] + i` and is new for `i < num_emitted[r]`; behind that are legal ids
    without meaning. Rows of chunks that are not final, and padding rows, are on the scratch slot and page.
    """

    slots: torch.Tensor  # [R] int64
    block_tables: torch.Tensor  # [R, P] int32
    tokens: torch.Tensor  # [R, Q] int64; Q = 1 + k in a decode step, 1 after a prefill
    start: torch.Tensor  # [R] int64, at least 1
    num_emitted: torch.Tensor  # [R] int64, 1 .. Q
    hidden: tuple[torch.Tensor, ...]  # [R, Q, D] each, at positions `start - 1 + i`
    history: torch.Tensor  # [R, H] int64, token at each position, these included; stale behind `newest`
    newest: torch.Tensor  # [R] int64, position of the newest token; not above the maximal length
    sampler: RowSampler  # how the target draws
    salts: torch.Tensor  # [R] int64; rows of different salts may not learn of each other's tokens


class Drafts(NamedTuple):
    """What a drafter proposes. Where it has nothing to say it still gives legal ids, behind the others, as filler."""

    token_ids: torch.Tensor  # [R, k] int64, legal ids
    num_valid: torch.Tensor  # [R] int64, how many are no filler


class DrafterBuffers(NamedTuple):
    """The tensors a drafter writes in place, by name. Fixed once `plan` has returned."""

    by_page: Mapping[str, torch.Tensor] = {}  # leading axis: page ids, those of the block tables
    by_slot: Mapping[str, torch.Tensor] = {}  # leading axis: slots, the scratch slot last
    shared: Mapping[str, torch.Tensor] = {}  # leading axis: entries that belong to no request, the scratch entry last
    scratch: Mapping[str, torch.Tensor] = {}  # means nothing after a step


class Drafter(Protocol):
    """Proposes the drafts of the next step, on the device, from the tokens accepted in this very step."""

    name: str

    # Exactly this many drafts count as accepted in every step, whatever the target says; None: the target decides.
    forced_num_accepted: int | None

    # The target's hidden states it is told, as transformers counts them: 0 is what enters the first layer, -1 what
    # the head of the model reads.
    hidden_layers: tuple[int, ...]

    # Proposing all drafts costs next to nothing, so every step proposes the most; otherwise it proposes as many as the
    # next step will take. Such a drafter may be left out of steps with k = 0, and reads what it missed in `prefill`
    # before it drafts again, unless it reads hidden states: then k is never 0.
    drafts_ahead: bool

    # Every token of a request must have gone through `prefill` or `propose` before the request decodes.
    reads_prompt: bool

    def lookahead(self, num_draft: int) -> int:
        """KV positions past the upper bound of a request that drafting itself writes."""

    def plan(self, buckets: Sequence[Bucket], table_width: int) -> None:
        """Get ready for decode steps of `buckets`; once, before the first capture."""

    def buffers(self) -> DrafterBuffers:
        """What it writes."""

    def plan_prefill(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start: torch.Tensor) -> None:
        """Get ready for one `prefill`. Host tensors, as in `AttentionBackend.plan_prefill`."""

    def prefill(self, chunks: PromptChunks) -> None:
        """Take in prompt tokens."""

    def propose(self, inputs: DraftInputs, num_draft: int) -> Drafts:
        """`num_draft` tokens that continue each row."""


class HistoryDrafter:
    """The parts of the protocol that a drafter without a state of its own leaves empty."""

    forced_num_accepted: int | None = None
    hidden_layers: tuple[int, ...] = ()
    drafts_ahead = True
    reads_prompt = False

    def lookahead(self, num_draft: int) -> int:
        return 0

    def plan(self, buckets: Sequence[Bucket], table_width: int) -> None:
        pass

    def buffers(self) -> DrafterBuffers:
        return DrafterBuffers()

    def plan_prefill(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start: torch.Tensor) -> None:
        pass

    def prefill(self, chunks: PromptChunks) -> None:
        pass
