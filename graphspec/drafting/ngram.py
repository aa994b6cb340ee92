"""Prompt lookup (Saxena 2023; `prompt_lookup_num_tokens` in transformers, "ngram" in vLLM), on the device."""

from __future__ import annotations

import torch

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
        width = history.shape[1]
        # matched[r, i]: how many tokens, at most max_n, ending at position i equal those ending at the newest token
        running = torch.ones_like(history, dtype=torch.bool)
        matched = torch.zeros_like(history, dtype=torch.int32)
        for back in range(min(self._max_n, width)):
            wanted = history.gather(1, (newest - back).clamp(min=0))
            same = torch.zeros_like(running)
            same[:, back:] = history[:, : width - back] == wanted
            running = running & same & (newest >= back)
            matched += running
        position = torch.arange(width, device=history.device)
        usable = (position < newest) & (matched >= self._min_n)
        rank = torch.where(usable, matched.to(torch.int64) * width + position, -1)
        best, end = rank.max(dim=1, keepdim=True)
        # The match repeats with this period; past the newest token the continuation repeats itself.
        period = newest - end
        steps = torch.arange(num_draft, device=history.device)
        found = best >= 0
        source = torch.where(found, end + 1 + steps % period.clamp(min=1), newest)
        return Drafts(history.gather(1, source), torch.where(found.squeeze(1), num_draft, 0))
