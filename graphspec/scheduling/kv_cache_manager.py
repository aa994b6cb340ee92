"""Which KV pages a request owns, and what the prefix cache learns from them. No torch.

    upper bound of a request = settled + placeholders in flight + placeholders of the launch
    pages it must own        = ceil(min(upper + drafter lookahead, limit) / page_size)

Both are written once, in `missing_pages` and `_pages_for`. Nothing depends on what a launch in flight will accept.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from graphspec.records.launch import IntArray
from graphspec.records.request import Request
from graphspec.scheduling.page_pool import PageHash, PagePool, page_hashes
from graphspec.scheduling.slot_table import SlotTable


class Allocation(NamedTuple):
    """The pages of a request that is about to run; the content of the first `num_cached` is already there."""

    pages: list[int]
    num_cached: int


class KVCacheManager:
    """Moves pages between `pool` and the rows of `table`. `lookahead` is how many positions past the newest token the
    drafter may write."""

    def __init__(self, pool: PagePool, table: SlotTable, page_size: int, lookahead: int) -> None:
        self._pool, self._table = pool, table
        self._page_size, self._lookahead = page_size, lookahead

    def _pages_for(self, upper: IntArray | int, limit: IntArray | int) -> IntArray:
        """Pages that hold `upper` tokens and what the drafter writes behind them. `limit` is never passed: what is
        written further on goes to the scratch page."""
        pages: IntArray = -(-np.minimum(upper + self._lookahead, limit) // self._page_size)
        return pages

    # Running requests.

    def missing_pages(self, slots: IntArray, placeholders: int) -> IntArray:
        """Pages each of `slots` still needs for a launch that adds `placeholders` to it; none if 0 or less."""
        table = self._table
        upper = table.settled[slots] + table.placeholders[slots] + placeholders
        return self._pages_for(upper, table.limit[slots]) - table.num_pages[slots]

    def reserve(self, slots: IntArray, counts: IntArray) -> bool:
        """Give each of `slots` its count of pages. False, and nothing is given, if there are too few for all."""
        wanted = int(counts.sum())
        if wanted > self._pool.num_available:
            return False
        self._table.append_pages(slots, counts, self._pool.reserve(wanted))
        return True

    # Requests come and go.

    def allocate(self, request: Request, placeholders: int) -> Allocation | None:
        """Pages for a waiting request and a launch that adds `placeholders` to it, shared with the prefix cache as far
        as it knows them. None, and nothing is taken, if there are too few now."""
        pool = self._pool
        # The last token is always computed: its logits are what the first sample is drawn from.
        reusable = 0 if request.wants_prompt_logprobs else request.num_tokens - 1
        cached = pool.find(self._hashes(request, reusable))
        needed = int(self._pages_for(request.num_tokens + placeholders, request.limit))
        count = needed - len(cached)
        if pool.num_available - pool.num_evictable(cached) < count:
            return None
        pool.share(cached)
        return Allocation(cached + pool.reserve(count), len(cached))

    def publish(self, slot: int, num_tokens: int) -> None:
        """Let the prefix cache know the full pages of the first `num_tokens` tokens, whose content is certain."""
        table, request = self._table, self._table.request[slot]
        assert request is not None
        full, start = num_tokens // self._page_size, int(table.published_pages[slot])
        if full > start and request.hash_root == self._pool.root(request.cache_salt):
            self._pool.publish(table.pages(slot), self._hashes(request, num_tokens), start)
            table.published_pages[slot] = full

    def withdraw(self, slot: int) -> None:
        """Make the prefix cache forget what this slot computed: it turned out to be wrong."""
        self._pool.withdraw(self._table.pages(slot)[self._table.cached_pages[slot] :])

    def release(self, slot: int) -> None:
        """Give the pages of `slot` back. The pool keeps them until every launch that may touch them is answered."""
        self._pool.release(self._table.pages(slot), int(self._table.last_step[slot]))

    def _hashes(self, request: Request, num_tokens: int) -> list[PageHash]:
        """The hash chain over the full pages of the first `num_tokens` tokens of a request, kept with it."""
        size, root = self._page_size, self._pool.root(request.cache_salt)
        if request.slot is None and request.hash_root != root:
            request.hash_root, request.page_hashes = root, []
        known, full = len(request.page_hashes), num_tokens // size
        if known < full:
            parent = request.page_hashes[-1] if known else request.hash_root
            request.page_hashes += page_hashes(parent, request.token_ids[known * size : full * size], size)
        return request.page_hashes[:full]
