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
from torch.nn import functional as F

from attention import AttentionBackend, AttnInputs
from graphspec.drafting import Drafter, DraftInputs, PromptChunks
from graphspec.execution.slot_state import SlotState
from graphspec.models.paged_model import PagedModel
from graphspec.models.paging import Paging
from graphspec.records.sampling_params import kind_parts
from graphspec.sampling.logprobs import token_logprobs
from graphspec.sampling.processors import Context
from graphspec.sampling.rejection import REJECTION, rejection
from graphspec.sampling.row_sampler import RowSampler
from graphspec.sampling.verification import leading_matches, verify

# Columns of an output row before its tokens: number of emitted tokens, leading healthy positions (legal input id,
# finite logits), the computed-token count the row started from, and how many leading drafts of the slot the target
# agreed with, of those that were verified and the one behind them.
OUTPUT_HEADER = 4

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
    drafts: torch.Tensor  # [R, Q - 1] int64, to verify
    known: torch.Tensor  # [R, K] int64, these and what else the slot holds; nothing after a prefill
    legal: torch.Tensor  # [R, Q] bool, the input id was one
    hidden: tuple[torch.Tensor, ...]  # [R, Q, D] each


def _unheard(part: str) -> None:
    pass


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
    part: Callable[[str], None] = _unheard  # told the name of each part of a step as it begins

    @property
    def max_draft(self) -> int:
        """The most drafts a slot holds."""
        return self.state.drafts.shape[1]

    def decode(self, inputs: DecodeInputs, num_draft: int, num_draft_next: int, sampler: str) -> StepTensors:
        """R rows of exactly 1 + `num_draft` positions, and `num_draft_next` drafts for the next step -> output rows
        `[R, OUTPUT_HEADER + 1 + max_draft]` (int32), if acceptance is to be explained with REJECTION more columns."""
        self.part("correct")
        tokens, known, computed = self._correct(inputs.row_slots, num_draft)
        legal = (tokens >= 0) & (tokens < self.vocab_size)
        tokens = tokens.clamp(0, self.vocab_size - 1)  # an id that went wrong must not reach an index
        positions = computed.unsqueeze(1) + torch.arange(tokens.shape[1], device=tokens.device)
        paged = self.paging.decode_inputs(inputs.block_tables, positions)
        self.part("forward")
        self.attention.prepare(paged)
        logits, hidden = self.model.forward(tokens, positions, paged, 0, self.drafter.hidden_layers)
        rows = _Rows(inputs.row_slots, inputs.block_tables, computed, tokens[:, 1:], known, legal, hidden)
        return self._widen(self._finish(logits, rows, num_draft_next, sampler), num_draft)

    def prefill(
        self, inputs: PrefillInputs, num_draft_next: int, sampler: str
    ) -> tuple[StepTensors, torch.Tensor | None]:
        """C packed chunks -> output rows `[C, OUTPUT_HEADER + 1]`, and log-probabilities `[N, logprob_width]` of prompt
        tokens; final chunks emit a token and the first drafts."""
        history = self.state.history
        tokens, paged = self._read_chunks(inputs)
        last = (inputs.query_start[1:] - 1).to(torch.int64)
        kept = torch.cat((last, inputs.scored))
        layers = self.drafter.hidden_layers
        logits, hidden = self.model.forward(tokens, inputs.positions.unsqueeze(0), paged, kept, layers)
        logits = logits.transpose(0, 1)  # [C + N, 1, V]
        prompt_logprobs = None
        if len(inputs.scored):
            successors = history[inputs.token_slots[inputs.scored], inputs.positions[inputs.scored] + 1]
            prompt_logprobs = token_logprobs(logits[len(last) :, 0], successors)
        self.drafter.prefill(self._chunks(inputs, tokens, paged, tuple(h[0] for h in hidden)))
        is_padding = (inputs.row_slots == self.state.scratch_slot).unsqueeze(1)
        computed = inputs.seq_lens.to(torch.int64) - 1
        rows = _Rows(
            slots=inputs.row_slots,
            block_tables=torch.where(is_padding, self.paging.scratch_page, inputs.block_tables),
            computed=computed,
            drafts=tokens.new_zeros((len(last), 0)),
            known=tokens.new_zeros((len(last), 0)),
            legal=torch.ones_like(computed, dtype=torch.bool).unsqueeze(1),
            hidden=tuple(h[0, last].unsqueeze(1) for h in hidden),
        )
        return self._finish(logits[: len(last)], rows, num_draft_next, sampler), prompt_logprobs

    def catch_up(self, inputs: PrefillInputs) -> None:
        """Let the drafter read C packed chunks that the target has computed long ago."""
        tokens, paged = self._read_chunks(inputs)
        self.drafter.prefill(self._chunks(inputs, tokens, paged, ()))

    def _chunks(
        self, inputs: PrefillInputs, tokens: torch.Tensor, paged: AttnInputs, hidden: tuple[torch.Tensor, ...]
    ) -> PromptChunks:
        salts = self.state.salt.index_select(0, inputs.token_slots)
        return PromptChunks(inputs.token_slots, tokens[0], inputs.positions, paged, hidden, salts)

    def _read_chunks(self, inputs: PrefillInputs) -> tuple[torch.Tensor, AttnInputs]:
        """Tokens `[1, T]` of packed chunks, and where they attend."""
        tokens = self.state.history[inputs.token_slots, inputs.positions].unsqueeze(0)
        tables = inputs.block_tables.index_select(0, inputs.token_rows)  # [T, P]
        slot_mapping = self.paging.slot_mapping(tables, inputs.positions.unsqueeze(1)).flatten()
        return tokens, AttnInputs(inputs.block_tables, inputs.seq_lens, inputs.query_start, slot_mapping)

    def _correct(self, slots: torch.Tensor, num_draft: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The truth of the slots, in the place of what the scheduler could not know: input tokens `[R, 1 + k]`
        (newest token, drafts), all drafts `[R, max_draft]` and computed counts `[R]`."""
        newest = self.state.last_token.index_select(0, slots).unsqueeze(1)
        known = self.state.drafts.index_select(0, slots)
        return torch.cat((newest, known[:, :num_draft]), dim=1), known, self.state.computed.index_select(0, slots)

    def _finish(self, logits: torch.Tensor, rows: _Rows, num_draft_next: int, sampler: str) -> StepTensors:
        """Verify, update the slots, draft the next step, and pack the output rows."""
        self.part("verify")
        state, kind, slots, computed = self.state, kind_parts(sampler), rows.slots, rows.computed
        num_verified = rows.drafts.shape[1]
        offsets = torch.arange(num_verified + 1, device=slots.device)
        places = computed.unsqueeze(1) + 1 + offsets  # absolute positions of the sampled tokens
        row_sampler, processed = RowSampler.of(kind, state.sampling, state.processors, slots), logits
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

        self.part("update")
        newest = (computed + verdict.num_emitted).clamp(max=self.paging.max_model_len)
        state.history.index_put_((slots.unsqueeze(1), places), verdict.emitted)
        state.computed.index_copy_(0, slots, newest)
        state.last_token.index_copy_(0, slots, verdict.newest)
        self.part("draft")
        if num_draft_next:
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
                salts=state.salt.index_select(0, slots),
            )
            proposed = self.drafter.propose(known, num_draft_next)
            state.drafts[:, :num_draft_next].index_copy_(0, slots, proposed.token_ids)
            state.num_valid.index_copy_(0, slots, proposed.num_valid)
        elif self.max_draft:
            state.num_valid.index_fill_(0, slots, 0)
        self.part("output")
        self._reset_scratch_slot()

        healthy = torch.isfinite(logits.amax(dim=-1)) & rows.legal
        if kind.processors:  # a token must be left
            healthy &= torch.isfinite(processed.amax(dim=-1))
        num_healthy = healthy.to(torch.int64).cumprod(dim=1).sum(dim=1)
        output = torch.where(offsets < verdict.num_emitted.unsqueeze(1), verdict.emitted, -1)
        header = torch.stack((verdict.num_emitted, num_healthy, computed, leading_matches(rows.known, samples)), dim=1)
        packed = torch.cat((torch.cat((header, output), dim=1).to(torch.int32), *why), dim=1)
        return (packed, token_logprobs(logits, verdict.emitted).flatten(1)) if kind.logprobs else (packed,)

    def _widen(self, output: StepTensors, num_draft: int) -> StepTensors:
        """Output rows of a step with `num_draft` in the layout that those of every decode step have."""
        unused = self.max_draft - num_draft
        if not unused:
            return output
        (packed, *logprobs), width = output, 1 + num_draft
        tokens, why = packed[:, : OUTPUT_HEADER + width], packed[:, OUTPUT_HEADER + width :]
        missing = REJECTION - why.shape[1] if self.explains else 0
        packed = torch.cat((F.pad(tokens, (0, unused), value=-1), F.pad(why, (0, missing))), dim=1)
        return (packed, *(F.pad(own, (0, unused * (own.shape[1] // width))) for own in logprobs))

    def _reset_scratch_slot(self) -> None:
        for field in (self.state.computed, self.state.last_token, self.state.drafts, self.state.num_valid):
            field.select(0, self.state.scratch_slot).zero_()
