"""Logits processors: what makes the logits of a position depend on a request's rules and on the tokens before it.

Nothing is counted from step to step. Every step derives the context of each of its positions from the token history of
the slot: what is settled up to the newest token, and behind it the drafts of the row, of which a position sees those
before it. So a rejected draft leaves nothing behind, and preemption, cached prefixes and resets need no care.

Penalties change the logits of tokens in the context only, so they are gathered, changed and scattered back: the work
grows with the length of the history, not with the vocabulary. Every function has static shapes and reads nothing back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from graphspec.sampling.rows import ProcessorRows

FORBIDDEN = float("-inf")


class Context(NamedTuple):
    """The tokens before each of Q positions of R rows."""

    history: torch.Tensor  # [R, H] int64, settled tokens and then the drafts of the row
    newest: torch.Tensor  # [R, Q] int64, place of the last token that the position sees

    @staticmethod
    def of(history: torch.Tensor, computed: torch.Tensor, drafts: torch.Tensor) -> Context:
        """`history` `[R, H]` is valid up to `computed` `[R]`; `drafts` `[R, k]` follow. Makes its own copy."""
        newest = computed.unsqueeze(1) + torch.arange(drafts.shape[1] + 1, device=drafts.device)
        return Context(history.scatter(1, newest[:, 1:], drafts), newest)


def process(logits: torch.Tensor, context: Context, rows: ProcessorRows) -> torch.Tensor:
    """New logits `[R, Q, V]` (float32): bias and allowed tokens, then bad words and min_tokens, then penalties.

    A row without processors keeps its logits.
    """
    processed = logits.float() + rows.bias.unsqueeze(1)
    _forbid_phrases(processed, context, rows)
    _penalise(processed, context, rows)
    return processed


def _forbid_phrases(logits: torch.Tensor, context: Context, rows: ProcessorRows) -> None:
    """Forbid the last token of a phrase where the tokens before it precede, at places below its limit. In place."""
    length = rows.phrases.shape[-1]
    back = torch.arange(2 - length, 1, device=logits.device)
    places = context.newest.unsqueeze(-1) + back  # [R, Q, L - 1]
    tail = context.history.gather(1, places.clamp(min=0).flatten(1)).view(places.shape)
    tail = tail.masked_fill(places < 0, -2)  # no token: only "anything" matches it
    prefix = rows.phrases[:, None, :, :-1]  # [R, 1, W, L - 1]
    follows = ((prefix == tail.unsqueeze(2)) | (prefix == -1)).all(dim=-1)  # [R, Q, W]
    holds = follows & (context.newest.unsqueeze(-1) + 1 < rows.until.unsqueeze(1))
    last = rows.phrases[:, None, :, -1].clamp(0, logits.shape[-1] - 1).to(torch.int64).expand(holds.shape)
    logits.scatter_add_(2, last, torch.where(holds, FORBIDDEN, 0.0))


def _penalise(logits: torch.Tensor, context: Context, rows: ProcessorRows) -> None:
    """Repetition, frequency and presence penalties, in place.

    A token that occurs twice is written twice, with the same value. What a position does not see is written as the
    first token of the prompt, which is always seen, so stale history can write nothing else.
    """
    rank = torch.arange(context.history.shape[1], device=logits.device)
    seen = rank <= context.newest.unsqueeze(-1)  # [R, Q, H]
    history = context.history.clamp(0, logits.shape[-1] - 1).unsqueeze(1)  # of padding rows it may hold anything
    tokens = torch.where(seen, history, history[..., :1])
    said = seen & (rank >= rows.num_prompt.view(-1, 1, 1))
    counts = torch.zeros_like(logits, dtype=torch.int32).scatter_add_(2, tokens, said.to(torch.int32))
    said_often = counts.gather(2, tokens)
    repetition, frequency, presence = (p.view(-1, 1, 1) for p in (rows.repetition, rows.frequency, rows.presence))
    values = logits.gather(2, tokens)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - frequency * said_often - presence * (said_often > 0)
    logits.scatter_(2, tokens, values)
