"""Counters of speculation. No torch."""

from __future__ import annotations

from collections import Counter

import numpy as np

from graphspec.records.launch import IntArray


class SpecStats:
    """Acceptance, counted the way the field counts it.

    num_drafts                 decode rows that verified drafts (one per row and step)
    num_draft_tokens           verified draft positions: num_drafts * k, if k is the same in all steps
    num_accepted_tokens        drafts accepted, *before* a stop rule cut the row
    num_delivered_draft_tokens drafts accepted and delivered, *after* that cut
    num_draft_tokens_per_pos, num_accepted_tokens_per_pos   how often the draft at position i was verified, and how
                               often it was accepted, before the cut
    num_steps_per_k            answered decode steps by k
    wasted_positions           positions computed for requests that had already ended; in no other counter
    num_output_tokens          tokens delivered
    prefix_cache_queries, _hits   tokens of admitted requests; those of them whose KV was already cached
    """

    def __init__(self, num_draft: int) -> None:
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = self.num_delivered_draft_tokens = 0
        self.num_draft_tokens_per_pos: IntArray = np.zeros(num_draft, np.int64)
        self.num_accepted_tokens_per_pos: IntArray = np.zeros(num_draft, np.int64)
        self.num_steps_per_k: Counter[int] = Counter()
        self.wasted_positions = self.num_output_tokens = self.num_preemptions = 0
        self.prefix_cache_queries = self.prefix_cache_hits = 0

    def record(self, num_draft: int, accepted: IntArray, delivered: IntArray) -> None:
        """Count the rows of one decode launch: drafts accepted before and delivered after the stop rules."""
        self.num_steps_per_k[num_draft] += 1
        if num_draft == 0:
            return
        self.num_drafts += len(accepted)
        self.num_draft_tokens += len(accepted) * num_draft
        self.num_draft_tokens_per_pos[:num_draft] += len(accepted)
        self.num_accepted_tokens += int(accepted.sum())
        self.num_delivered_draft_tokens += int(delivered.sum())
        at_most = np.bincount(accepted, minlength=1 + num_draft).cumsum()  # rows that accepted no more than 0, 1 ...
        self.num_accepted_tokens_per_pos[:num_draft] += len(accepted) - at_most[:num_draft]

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted drafts per verified row; 1.0 without speculation."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted drafts per verified draft; 0.0 without speculation."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_rates(self) -> list[float]:
        """Share of verified rows whose draft at position 0, 1, ... was accepted."""
        rates: list[float] = (self.num_accepted_tokens_per_pos / np.maximum(1, self.num_draft_tokens_per_pos)).tolist()
        return rates
