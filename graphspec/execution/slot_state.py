"""The device truth: what is known about each slot after everything launched so far has run.

Rows gather from it and scatter to it inside a step; the host never reads it. Slot `num_slots` is the scratch slot:
padding rows use it, and every step leaves it as it was.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from graphspec.records.launch import Admission
from graphspec.records.token_rules import MAX_PHRASE_TOKENS, MAX_PHRASES
from graphspec.sampling.rows import ProcessorRows, SamplingRows, as_int32


class SlotState(NamedTuple):
    """One row per slot, and the scratch slot last (S + 1 rows)."""

    computed: torch.Tensor  # [S + 1] int64, tokens with KV = position of the last token
    last_token: torch.Tensor  # [S + 1] int64, the newest token; it has no KV yet
    drafts: torch.Tensor  # [S + 1, k] int64, proposals for the tokens after it
    num_valid: torch.Tensor  # [S + 1] int64, how many of them are no filler
    history: torch.Tensor  # [S + 1, H] int64, token at each position; valid up to `computed`, stale beyond
    speculation: torch.Tensor  # [S + 1] int64, most drafts that may be accepted: k, or 0 for a request without
    salt: torch.Tensor  # [S + 1] int64, equal for requests that may share what a drafter keeps
    sampling: SamplingRows
    processors: ProcessorRows

    @property
    def scratch_slot(self) -> int:
        return self.computed.shape[0] - 1


def allocate_state(
    num_slots: int, num_draft: int, history_width: int, vocab_size: int, device: torch.device
) -> SlotState:
    rows = num_slots + 1

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    sampling = SamplingRows(
        temperature=zeros(rows, dtype=torch.float32),
        top_k=zeros(rows, dtype=torch.int32),
        top_p=torch.ones(rows, dtype=torch.float32, device=device),
        min_p=zeros(rows, dtype=torch.float32),
        seed=zeros(rows, 2, dtype=torch.int32),
        completion=zeros(rows, dtype=torch.int32),
    )
    processors = ProcessorRows(
        repetition=torch.ones(rows, dtype=torch.float32, device=device),
        presence=zeros(rows, dtype=torch.float32),
        frequency=zeros(rows, dtype=torch.float32),
        num_prompt=zeros(rows),
        bias=zeros(rows, vocab_size, dtype=torch.float32),
        phrases=torch.full((rows, MAX_PHRASES, MAX_PHRASE_TOKENS), -1, dtype=torch.int32, device=device),
        until=zeros(rows, MAX_PHRASES),
    )
    return SlotState(
        computed=zeros(rows),
        last_token=zeros(rows),
        drafts=zeros(rows, num_draft),
        num_valid=zeros(rows),
        history=zeros(rows, history_width),
        speculation=zeros(rows),
        salt=zeros(rows),
        sampling=sampling,
        processors=processors,
    )


def admit(state: SlotState, admission: Admission) -> None:
    """Initialise a slot for its new owner. Runs on the stream, so after every launch that still used the slot.

    `computed` names the last known token as the newest one, which is what a decode step needs if nothing else has to
    be prefilled; a prefill sets it again with its final chunk.
    """
    slot, known = admission.slot, len(admission.token_ids)
    tokens = torch.from_numpy(admission.token_ids).to(state.history.device, torch.int64)
    state.history[slot, :known] = tokens
    state.computed[slot] = known - 1
    state.last_token[slot] = tokens[-1]
    state.drafts[slot] = tokens[-1]  # legal filler
    state.num_valid[slot] = 0
    params, sampling = admission.params, state.sampling
    state.speculation[slot] = state.drafts.shape[1] if params.speculation else 0
    state.salt[slot] = admission.salt
    sampling.temperature[slot] = params.temperature
    sampling.top_k[slot] = params.top_k
    sampling.top_p[slot] = params.top_p
    sampling.min_p[slot] = params.min_p
    sampling.seed[slot, 0] = as_int32(admission.seed)
    sampling.seed[slot, 1] = as_int32(admission.seed >> 32)
    sampling.completion[slot] = admission.index
    _admit_processors(state.processors, admission)


def _admit_processors(processors: ProcessorRows, admission: Admission) -> None:
    slot, params, rules, device = admission.slot, admission.params, admission.rules, processors.bias.device
    processors.repetition[slot] = params.repetition_penalty
    processors.presence[slot] = params.presence_penalty
    processors.frequency[slot] = params.frequency_penalty
    processors.num_prompt[slot] = admission.num_prompt
    bias = processors.bias[slot]
    bias.zero_()
    if rules.allowed is not None:
        bias.fill_(float("-inf"))
        bias[torch.tensor(rules.allowed, device=device)] = 0.0
    if rules.bias:
        ids, values = zip(*rules.bias, strict=True)
        bias[torch.tensor(ids, device=device)] += torch.tensor(values, device=device)
    if rules.forbidden:
        bias[torch.tensor(rules.forbidden, device=device)] = float("-inf")
    processors.until[slot] = 0
    if rules.phrases:
        width = processors.phrases.shape[-1]
        aligned = [[-1] * (width - len(p.token_ids)) + list(p.token_ids) for p in rules.phrases]
        processors.phrases[slot, : len(aligned)] = torch.tensor(aligned, dtype=torch.int32, device=device)
        processors.until[slot, : len(aligned)] = torch.tensor([p.until for p in rules.phrases], device=device)
