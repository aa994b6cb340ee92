"""Prompt lookup (Saxena 2023; `prompt_lookup_num_tokens` in transformers, "ngram" in vLLM), on the device."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from graphspec.drafting.pool import NgramPool
from graphspec.drafting.protocol import DrafterBuffers, DraftInputs, Drafts, HistoryDrafter, PromptChunks


class NgramDrafter(HistoryDrafter):
    """Find where the newest tokens of a row occurred before, and propose what followed.

    Of all earlier occurrences the longest match within `min_n .. max_n` tokens wins, of equally long ones the latest.
    A row without a match is drafted for from `pool`, if there is one, by its last `max_n` tokens; what is left gets the
    token before it as filler. Work grows with the width of the history.
    """

    name = "ngram"

    def __init__(self, min_n: int, max_n: int, pool: NgramPool | None = None) -> None:
        self._min_n, self._max_n, self._pool = min_n, max_n, pool

    def buffers(self) -> DrafterBuffers:
        return DrafterBuffers() if self._pool is None else DrafterBuffers(shared={"ngram_pool": self._pool.entries})

    def prefill(self, chunks: PromptChunks) -> None:
        """Note the n-grams that lie in one chunk whole."""
        width = self._max_n + 1
        if self._pool is None or len(chunks.token_ids) < width:
            return
        slots, places, tokens = (t.unfold(0, width, 1) for t in (chunks.slots, chunks.positions, chunks.token_ids))
        whole = (slots[:, 0] == slots[:, -1]) & (places[:, -1] - places[:, 0] == width - 1)
        self._pool.write(slots[:, 0], chunks.salts[: len(tokens)], tokens, whole)

    def propose(self, inputs: DraftInputs, num_draft: int) -> Drafts:
        own = self._from_history(inputs, num_draft)
        if self._pool is None:
            return own
        self._note_emitted(self._pool, inputs)
        back = torch.arange(self._max_n - 1, -1, -1, device=inputs.newest.device)
        places = inputs.newest.unsqueeze(1) - back
        tokens = inputs.history.gather(1, places.clamp(min=0))
        pooled = self._pool.chain(inputs.salts, tokens, places[:, 0] >= 0, num_draft)
        found = own.num_valid > 0
        return Drafts(
            torch.where(found.unsqueeze(1), own.token_ids, pooled.token_ids),
            torch.where(found, own.num_valid, pooled.num_valid),
        )

    def _note_emitted(self, pool: NgramPool, inputs: DraftInputs) -> None:
        """Write the n-grams that end at an emitted token."""
        rows, width = inputs.tokens.shape
        offsets = torch.arange(width, device=inputs.start.device)
        back = torch.arange(self._max_n, -1, -1, device=inputs.start.device)
        places = (inputs.start.unsqueeze(1) + offsets).unsqueeze(2) - back  # [R, Q, n + 1]
        whole = (offsets < inputs.num_emitted.unsqueeze(1)) & (places[:, :, 0] >= 0)
        tokens = inputs.history.gather(1, places.clamp(min=0).flatten(1)).view(rows * width, -1)
        slots, salts = (t.unsqueeze(1).expand(-1, width).flatten() for t in (inputs.slots, inputs.salts))
        pool.write(slots, salts, tokens, whole.flatten())

    def _from_history(self, inputs: DraftInputs, num_draft: int) -> Drafts:
        history, newest = inputs.history, inputs.newest.unsqueeze(1)  # [R, H], [R, 1]
        width, device = history.shape[1], history.device
        most, position = min(self._max_n, width), torch.arange(width, device=device)
        # matched[r, i]: how many tokens, at most max_n, ending at position i equal those ending at the newest token
        behind = F.pad(history, (most, 0))
        tail = torch.split(behind.gather(1, newest + torch.arange(1, most + 1, device=device)), 1, dim=1)
        windows = behind[:, 1:].unfold(1, most, 1).unbind(2)
        matched = torch.where(windows[0] == tail[0], most, most - 1)
        for back in range(most - 2, -1, -1):
            matched = torch.where(windows[most - 1 - back] == tail[most - 1 - back], matched, back)
        matched = torch.minimum(
            matched, torch.arange(1, width + 1, device=device)
        )  # there is nothing before the first token
        rank = torch.where(position < newest, position.add(matched, alpha=width), -1)
        best, end = rank.max(dim=1, keepdim=True)
        found = best >= self._min_n * width
        # The match repeats with this period; past the newest token the continuation repeats itself. Filler repeats it.
        period = torch.where(found, newest - end, 1)
        source = torch.arange(num_draft, device=device) % period - period + (newest + 1)
        return Drafts(history.gather(1, source), found.squeeze(1) * num_draft)
