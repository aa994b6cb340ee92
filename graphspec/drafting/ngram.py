"""Prompt lookup (Saxena 2023; `prompt_lookup_num_tokens` in transformers, "ngram" in vLLM), on the device."""

from __future__ import annotations

import torch

from graphspec.drafting.protocol import DraftInputs, Drafts, HistoryDrafter


class NgramDrafter(HistoryDrafter):
    """Find where the newest tokens of a row occurred before, and propose what followed.

    Of all earlier occurrences the longest match within `min_n .. max_n` tokens wins, of equally long ones the latest.
    A row without a match gets its newest token as filler. Work grows with the width of the history.
    """

    name = "ngram"

    def __init__(self, min_n: int, max_n: int) -> None:
        self._min_n, self._max_n = min_n, max_n

    def propose(self, inputs: DraftInputs, num_draft: int) -> Drafts:
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
