"""One step on the device: correct -> forward -> verify -> update -> draft -> output row.

These functions are captured. They take tensors and return tensors, have static shapes, read nothing back to the host
and hold no Python value that changes between steps. A decode step and a prefill differ in how they find their input
tokens and in how many positions they sample; everything after the forward pass is the same function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from attention import AttentionBackend, AttnInputs
from graphspec.drafting import Drafter, DraftInputs, PromptChunks
from graphspec.explain import rejection
from graphspec.logprobs import token_logprobs
from graphspec.model import PagedModel
from graphspec.paging import Paging
from graphspec.processors import Context
from graphspec.request import kind_parts
from graphspec.row_sampler import RowSampler
from graphspec.state import SlotState
from graphspec.verify import verify

# Columns of an output row before its tokens: number of emitted tokens, leading healthy positions (legal input id,
# finite logits), and the computed-token count the row started from.
OUTPUT_HEADER = 3

# Output rows, and for kinds with log-probabilities those of the tokens in them, [R, width * logprob_width] (int32).
StepTensors = tuple[torch.Tensor, ...]


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


class _Rows(NamedTuple):
    """What is known of R rows before they are verified; Q = 1 + k positions, or 1 after a prefill."""

    slots: torch.Tensor  # [R] int64
    block_tables: torch.Tensor  # [R, P] int32
    computed: torch.Tensor  # [R] int64
    drafts: torch.Tensor  # [R, Q - 1] int64
    legal: torch.Tensor  # [R, Q] bool, the input id was one
    hidden: tuple[torch.Tensor, ...]  # [R, Q, D] each


@dataclass(frozen=True)
class Iteration:
    """What is fixed for every step of an engine."""

    model: PagedModel
    attention: AttentionBackend
    state: SlotState
    drafter: Drafter
    paging: Paging
    vocab_size: int
    explains: bool = False  # output rows of decode steps end with `explain.rejection`

    def decode(self, inputs: DecodeInputs, num_draft: int, sampler: str) -> StepTensors:
        """R rows of exactly 1 + k positions -> output rows `[R, OUTPUT_HEADER + 1 + k]` (int32), if acceptance is to be
        explained with REJECTION more columns."""
        tokens, computed = self._correct(inputs.row_slots, num_draft)
        legal = (tokens >= 0) & (tokens < self.vocab_size)
        tokens = tokens.clamp(0, self.vocab_size - 1)  # an id that went wrong must not reach an index
        positions = computed.unsqueeze(1) + torch.arange(tokens.shape[1], device=tokens.device)
        paged = self.paging.decode_inputs(inputs.block_tables, positions)
        self.attention.prepare(paged)
        logits, hidden = self.model.forward(tokens, positions, paged, 0, self.drafter.hidden_layers)
        rows = _Rows(inputs.row_slots, inputs.block_tables, computed, tokens[:, 1:], legal, hidden)
        return self._finish(logits, rows, num_draft, sampler)

    def prefill(self, inputs: PrefillInputs, num_draft: int, sampler: str) -> tuple[StepTensors, torch.Tensor | None]:
        """C packed chunks -> output rows `[C, OUTPUT_HEADER + 1]`, and log-probabilities `[N, logprob_width]` of prompt
        tokens; final chunks emit a token and the first drafts."""
        history = self.state.history
        tokens = history[inputs.token_slots, inputs.positions].unsqueeze(0)
        tables = inputs.block_tables.index_select(0, inputs.token_rows)  # [T, P]
        slot_mapping = self.paging.slot_mapping(tables, inputs.positions.unsqueeze(1)).flatten()
        paged = AttnInputs(inputs.block_tables, inputs.seq_lens, inputs.query_start, slot_mapping)
        last = (inputs.query_start[1:] - 1).to(torch.int64)
        kept = torch.cat((last, inputs.scored))
        layers = self.drafter.hidden_layers
        logits, hidden = self.model.forward(tokens, inputs.positions.unsqueeze(0), paged, kept, layers)
        logits = logits.transpose(0, 1)  # [C + N, 1, V]
        prompt_logprobs = None
        if len(inputs.scored):
            successors = history[inputs.token_slots[inputs.scored], inputs.positions[inputs.scored] + 1]
            prompt_logprobs = token_logprobs(logits[len(last) :, 0], successors)
        if num_draft:
            read = tuple(h[0] for h in hidden)
            self.drafter.prefill(PromptChunks(inputs.token_slots, tokens[0], inputs.positions, paged, read))
        is_padding = (inputs.row_slots == self.state.scratch_slot).unsqueeze(1)
        computed = inputs.seq_lens.to(torch.int64) - 1
        rows = _Rows(
            slots=inputs.row_slots,
            block_tables=torch.where(is_padding, self.paging.scratch_page, inputs.block_tables),
            computed=computed,
            drafts=tokens.new_zeros((len(last), 0)),
            legal=torch.ones_like(computed, dtype=torch.bool).unsqueeze(1),
            hidden=tuple(h[0, last].unsqueeze(1) for h in hidden),
        )
        return self._finish(logits[: len(last)], rows, num_draft, sampler), prompt_logprobs

    def _correct(self, slots: torch.Tensor, num_draft: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The truth of the slots, in the place of what the scheduler could not know: input tokens `[R, 1 + k]`
        (newest token, drafts) and computed counts `[R]`."""
        newest = self.state.last_token.index_select(0, slots).unsqueeze(1)
        drafts = self.state.drafts.index_select(0, slots)[:, :num_draft]
        return torch.cat((newest, drafts), dim=1), self.state.computed.index_select(0, slots)

    def _finish(self, logits: torch.Tensor, rows: _Rows, num_draft: int, sampler: str) -> StepTensors:
        """Verify, update the slots, draft the next step, and pack the output rows."""
        state, kind, slots, computed = self.state, kind_parts(sampler), rows.slots, rows.computed
        num_verified = rows.drafts.shape[1]
        offsets = torch.arange(num_verified + 1, device=slots.device)
        places = computed.unsqueeze(1) + 1 + offsets  # absolute positions of the sampled tokens
        row_sampler, processed = RowSampler.of(kind, state, slots), logits
        if kind.processors:
            context = Context.of(state.history.index_select(0, slots), computed, rows.drafts)
            processed = row_sampler.process(logits, context)
        samples = row_sampler.draw(processed, places)
        most = state.speculation.index_select(0, slots).clamp(0, num_verified)
        verdict = verify(rows.drafts, samples, most, self.drafter.forced_num_accepted if num_verified else None)

        why = []
        if self.explains and num_verified:
            num_valid = state.num_valid.index_select(0, slots)
            why = [rejection(processed, rows.drafts, verdict, num_valid, row_sampler)]

        newest = (computed + verdict.num_emitted).clamp(max=self.paging.max_model_len)
        state.history.index_put_((slots.unsqueeze(1), places), verdict.emitted)
        state.computed.index_copy_(0, slots, newest)
        state.last_token.index_copy_(0, slots, verdict.newest)
        if num_draft:
            known = DraftInputs(
                slots=slots,
                block_tables=rows.block_tables,
                tokens=verdict.emitted,
                start=computed + 1,
                num_emitted=verdict.num_emitted,
                hidden=rows.hidden,
                history=state.history.index_select(0, slots),
                newest=newest,
                sampler=row_sampler,
            )
            proposed = self.drafter.propose(known, num_draft)
            state.drafts.index_copy_(0, slots, proposed.token_ids)
            state.num_valid.index_copy_(0, slots, proposed.num_valid)
        self._reset_scratch_slot()

        healthy = torch.isfinite(logits.amax(dim=-1)) & rows.legal
        if kind.processors:  # a token must be left
            healthy &= torch.isfinite(processed.amax(dim=-1))
        num_healthy = healthy.to(torch.int64).cumprod(dim=1).sum(dim=1)
        output = torch.where(offsets < verdict.num_emitted.unsqueeze(1), verdict.emitted, -1)
        header = torch.stack((verdict.num_emitted, num_healthy, computed), dim=1)
        packed = torch.cat((torch.cat((header, output), dim=1).to(torch.int32), *why), dim=1)
        return (packed, token_logprobs(logits, verdict.emitted).flatten(1)) if kind.logprobs else (packed,)

    def _reset_scratch_slot(self) -> None:
        for field in (self.state.computed, self.state.last_token, self.state.drafts, self.state.num_valid):
            field.select(0, self.state.scratch_slot).zero_()
