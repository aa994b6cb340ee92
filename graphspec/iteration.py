"""One step on the device: correct -> forward -> verify -> update -> draft -> output row.

These functions are captured. They take tensors and return tensors, have static shapes, read nothing back to the host
and hold no Python value that changes between steps. A decode step and a prefill differ in how they find their input
tokens and in how many positions they sample; everything after the forward pass is the same function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from attention import AttentionBackend, AttnInputs
from graphspec.drafting import Drafter
from graphspec.logprobs import token_logprobs
from graphspec.processors import Context, process
from graphspec.request import kind_parts
from graphspec.sampling import sample
from graphspec.state import SlotState
from graphspec.verify import verify

# Columns of an output row before its tokens: number of emitted tokens, leading healthy positions (legal input id,
# finite logits), and the computed-token count the row started from.
OUTPUT_HEADER = 3

# Output rows, and for kinds with log-probabilities those of the tokens in them, [R, width * logprob_width] (int32).
StepTensors = tuple[torch.Tensor, ...]

Forward = Callable[[torch.Tensor, torch.Tensor, AttnInputs, int | torch.Tensor], torch.Tensor]


class DecodeInputs(NamedTuple):
    """Staged by the host for R rows, in stream order before the step: which slot a row is, and where its pages are.
    What the scheduler believes about draft ids and computed counts is stale and is not sent at all."""

    row_slots: torch.Tensor  # [R] int64, padding rows carry the scratch slot
    block_tables: torch.Tensor  # [R, P] int32


class PrefillInputs(NamedTuple):
    """Staged by the host for C packed chunks of T tokens in all. Host lengths of prompts are exact."""

    token_slots: torch.Tensor  # [T] int64, slot of each token
    token_rows: torch.Tensor  # [T] int64, chunk of each token
    positions: torch.Tensor  # [T] int64
    query_start: torch.Tensor  # [C + 1] int32
    seq_lens: torch.Tensor  # [C] int32
    row_slots: torch.Tensor  # [C] int64, the scratch slot for chunks that are not final: they sample nothing
    block_tables: torch.Tensor  # [C, P] int32
    scored: torch.Tensor  # [N] int64, indices of tokens whose successor in the prompt is asked for


@dataclass(frozen=True)
class Iteration:
    """What is fixed for every step of an engine."""

    forward: Forward
    attention: AttentionBackend
    state: SlotState
    drafter: Drafter
    page_size: int
    scratch_page: int
    max_model_len: int
    vocab_size: int

    def decode(self, inputs: DecodeInputs, num_draft: int, sampler: str) -> StepTensors:
        """R rows of exactly 1 + k positions -> output rows `[R, OUTPUT_HEADER + 1 + k]` (int32)."""
        tokens, computed = self._correct(inputs.row_slots, num_draft)
        legal = (tokens >= 0) & (tokens < self.vocab_size)
        tokens = tokens.clamp(0, self.vocab_size - 1)  # an id that went wrong must not reach an index
        rows, width = tokens.shape
        positions = computed.unsqueeze(1) + torch.arange(width, device=tokens.device)
        paged = AttnInputs(
            block_tables=inputs.block_tables,
            seq_lens=(computed + width).to(torch.int32),
            query_start=torch.arange(0, (rows + 1) * width, width, dtype=torch.int32, device=tokens.device),
            slot_mapping=self._slot_mapping(inputs.block_tables, positions).flatten(),
            query_len=width,
        )
        self.attention.prepare(paged)
        logits = self.forward(tokens, positions, paged, 0)
        return self._finish(logits, tokens[:, 1:], inputs.row_slots, computed, legal, num_draft, sampler)

    def prefill(self, inputs: PrefillInputs, num_draft: int, sampler: str) -> tuple[StepTensors, torch.Tensor | None]:
        """C packed chunks -> output rows `[C, OUTPUT_HEADER + 1]`, and log-probabilities `[N, logprob_width]` of prompt
        tokens; final chunks emit a token and the first drafts."""
        history = self.state.history
        tokens = history[inputs.token_slots, inputs.positions].unsqueeze(0)
        tables = inputs.block_tables.index_select(0, inputs.token_rows)  # [T, P]
        slot_mapping = self._slot_mapping(tables, inputs.positions.unsqueeze(1)).flatten()
        paged = AttnInputs(inputs.block_tables, inputs.seq_lens, inputs.query_start, slot_mapping)
        last = (inputs.query_start[1:] - 1).to(torch.int64)
        kept = torch.cat((last, inputs.scored))
        logits = self.forward(tokens, inputs.positions.unsqueeze(0), paged, kept).transpose(0, 1)  # [C + N, 1, V]
        prompt_logprobs = None
        if len(inputs.scored):
            successors = history[inputs.token_slots[inputs.scored], inputs.positions[inputs.scored] + 1]
            prompt_logprobs = token_logprobs(logits[len(last) :, 0], successors)
        no_drafts = tokens.new_zeros((inputs.row_slots.shape[0], 0))
        computed = inputs.seq_lens.to(torch.int64) - 1
        legal = torch.ones_like(computed, dtype=torch.bool).unsqueeze(1)
        output = self._finish(logits[: len(last)], no_drafts, inputs.row_slots, computed, legal, num_draft, sampler)
        return output, prompt_logprobs

    def _correct(self, slots: torch.Tensor, num_draft: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The truth of the slots, in the place of what the scheduler could not know: input tokens `[R, 1 + k]`
        (newest token, drafts) and computed counts `[R]`."""
        newest = self.state.last_token.index_select(0, slots).unsqueeze(1)
        drafts = self.state.drafts.index_select(0, slots)[:, :num_draft]
        return torch.cat((newest, drafts), dim=1), self.state.computed.index_select(0, slots)

    def _slot_mapping(self, block_tables: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where the K/V of `positions` `[R, Q]` go. Past the maximal length they go to the scratch page: sequence
        lengths are never clamped, since that would shift the causal diagonal of the certain token too."""
        pages = block_tables.gather(1, positions // self.page_size).to(torch.int64)
        pages = torch.where(positions < self.max_model_len, pages, self.scratch_page)
        return pages * self.page_size + positions % self.page_size

    def _finish(
        self,
        logits: torch.Tensor,
        drafts: torch.Tensor,
        slots: torch.Tensor,
        computed: torch.Tensor,
        legal: torch.Tensor,
        num_draft: int,
        sampler: str,
    ) -> StepTensors:
        """Verify, update the slots, draft the next step, and pack the output rows."""
        state, kind = self.state, kind_parts(sampler)
        num_verified = drafts.shape[1]
        offsets = torch.arange(num_verified + 1, device=slots.device)
        places = computed.unsqueeze(1) + 1 + offsets  # absolute positions of the sampled tokens
        processed = logits
        if kind.processors:
            context = Context.of(state.history.index_select(0, slots), computed, drafts)
            processed = process(logits, context, state.processors.rows(slots))
        params = state.sampling if kind.base == "greedy" else state.sampling.rows(slots)  # greedy reads none
        samples = sample(processed, places, params, kind.base)
        most = state.speculation.index_select(0, slots).clamp(0, num_verified)
        verdict = verify(drafts, samples, most, self.drafter.forced_num_accepted if num_verified else None)

        new_computed = (computed + verdict.num_emitted).clamp(max=self.max_model_len)
        state.history.index_put_((slots.unsqueeze(1), places), verdict.emitted)
        state.computed.index_copy_(0, slots, new_computed)
        state.last_token.index_copy_(0, slots, verdict.newest)
        if num_draft:
            history = state.history.index_select(0, slots)
            state.drafts.index_copy_(0, slots, self.drafter.propose(history, new_computed + 1, num_draft))
        self._reset_scratch_slot()

        healthy = torch.isfinite(logits.amax(dim=-1)) & legal
        if kind.processors:  # a token must be left
            healthy &= torch.isfinite(processed.amax(dim=-1))
        num_healthy = healthy.to(torch.int64).cumprod(dim=1).sum(dim=1)
        output = torch.where(offsets < verdict.num_emitted.unsqueeze(1), verdict.emitted, -1)
        header = torch.stack((verdict.num_emitted, num_healthy, computed), dim=1)
        packed = torch.cat((header, output), dim=1).to(torch.int32)
        return (packed, token_logprobs(logits, verdict.emitted).flatten(1)) if kind.logprobs else (packed,)

    def _reset_scratch_slot(self) -> None:
        for field in (self.state.computed, self.state.last_token, self.state.drafts):
            field.select(0, self.state.scratch_slot).zero_()
