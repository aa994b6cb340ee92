"""What the host knows about each slot, as a structure of arrays: per-row work is vectorised, no objects in loops."""

from __future__ import annotations

import numpy as np

from graphspec.records.launch import IntArray, PageTable
from graphspec.records.request import Request

FREE, PREFILL, DECODE = 0, 1, 2


class SlotTable:
    """Host facts of S slots. Every array is indexed by slot.

    phase           FREE, PREFILL or DECODE
    epoch           bumped whenever the slot changes hands; answers of an older epoch are dropped
    settled         tokens whose acceptance the host has seen, prompt included
    placeholders    output positions in flight: the most tokens that launches in flight can emit
    min_in_flight   the fewest tokens they will emit: one for each launch that samples for the slot
    prefilled       tokens covered by cached pages and launched prefill chunks
    cached_pages, published_pages   leading pages that came from the prefix cache; that were made known to it
    limit           most tokens the request may reach
    min_length      no stop rule applies before this many tokens, prompt included
    has_stop_strings
    decode_steps, off_graph_steps   answered decode steps of the request in this slot; those that replayed no graph
    speculates      drafts are accepted for the request
    scored_to       prompt positions below this return the log-probability of the token after them; 0: none were
                    requested, or all are known
    rank            order of service, see `Request.rank`
    sampler_needs   SamplerNeeds of the request
    last_step       newest launch that holds the slot, the fence of its pages
    num_pages, page_table [S, P]   pages owned; the other entries hold the scratch page
    """

    def __init__(self, num_slots: int, table_width: int, scratch_page: int) -> None:
        self.num_slots = num_slots
        self.scratch_page = scratch_page
        self.phase = np.zeros(num_slots, np.int8)
        self.epoch, self.settled, self.placeholders, self.min_in_flight = (_zeros(num_slots) for _ in range(4))
        self.prefilled, self.limit, self.rank, self.sampler_needs = (_zeros(num_slots) for _ in range(4))
        self.min_length, self.scored_to, self.cached_pages, self.published_pages = (_zeros(num_slots) for _ in range(4))
        self.decode_steps, self.off_graph_steps = (_zeros(num_slots) for _ in range(2))
        self.has_stop_strings, self.speculates = (np.zeros(num_slots, np.bool_) for _ in range(2))
        self.last_step = np.full(num_slots, -1, np.int64)
        self.num_pages = _zeros(num_slots)
        self.page_table: PageTable = np.full((num_slots, table_width), scratch_page, np.int32)
        self.stop_ids: IntArray = np.full((num_slots, 1), -1, np.int64)  # padded with -1, which is no token
        self.request: list[Request | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    # A request takes a slot and gives it back.

    def allocate(
        self, request: Request, pages: list[int], num_cached: int, page_size: int, *, may_skip_prefill: bool
    ) -> int:
        """Give a free slot to `request`, which owns `pages`; the content of the first `num_cached` is already there.
        `may_skip_prefill`: a request with one token left to compute can decode at once. The caller has checked
        `num_free`."""
        slot = self._free.pop()
        request.slot = slot
        self.request[slot] = request
        self.settled[slot] = request.num_tokens
        self.cached_pages[slot] = self.published_pages[slot] = num_cached
        self.prefilled[slot] = num_cached * page_size
        # A decode step starts from the newest token, so with only that one left there is nothing to prefill.
        one_left = self.settled[slot] - self.prefilled[slot] == 1
        self.phase[slot] = DECODE if may_skip_prefill and one_left else PREFILL
        self.limit[slot] = request.limit
        self.min_length[slot] = len(request.prompt_ids) + request.params.min_tokens
        self.has_stop_strings[slot] = bool(request.params.stop)
        self.speculates[slot] = request.params.speculation
        self.scored_to[slot] = len(request.prompt_ids) - 1 if request.wants_prompt_logprobs else 0
        self.rank[slot] = request.rank
        self.sampler_needs[slot] = int(request.params.needs)
        if len(request.stop_ids) > self.stop_ids.shape[1]:
            extra = len(request.stop_ids) - self.stop_ids.shape[1]
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, extra)), constant_values=-1)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(request.stop_ids)] = sorted(request.stop_ids)
        self.append_pages(np.array([slot]), np.array([len(pages)]), pages)
        return slot

    def free(self, slot: int) -> None:
        """The one reset of a slot (finish, abort, preemption)."""
        request = self.request[slot]
        assert request is not None
        request.slot = None
        request.num_decode_steps += int(self.decode_steps[slot])
        request.num_off_graph_steps += int(self.off_graph_steps[slot])
        self.request[slot] = None
        self.phase[slot] = FREE
        self.epoch[slot] += 1
        for array in (self.settled, self.placeholders, self.min_in_flight, self.prefilled, self.limit, self.num_pages):
            array[slot] = 0
        for array in (self.cached_pages, self.published_pages, self.decode_steps, self.off_graph_steps):
            array[slot] = 0
        self.last_step[slot] = -1
        self.page_table[slot] = self.scratch_page
        self._free.append(slot)

    # Launches come and are answered.

    def add_in_flight(self, slots: IntArray, placeholders: int) -> None:
        """A launch samples for `slots`, each at `placeholders` positions."""
        self.placeholders[slots] += placeholders
        self.min_in_flight[slots] += 1

    def remove_in_flight(self, slots: IntArray, placeholders: int) -> None:
        """The answer to such a launch is there."""
        self.placeholders[slots] -= placeholders
        self.min_in_flight[slots] -= 1

    # Pages.

    def append_pages(self, slots: IntArray, counts: IntArray, pages: list[int]) -> None:
        """Append to each of `slots` its count of `pages`, in order."""
        which = np.repeat(np.arange(len(slots)), counts)
        place = np.arange(len(pages)) - (counts.cumsum() - counts)[which]
        self.page_table[slots[which], self.num_pages[slots][which] + place] = pages
        self.num_pages[slots] += counts

    def pages(self, slot: int) -> list[int]:
        owned: list[int] = self.page_table[slot, : self.num_pages[slot]].tolist()
        return owned


def _zeros(count: int) -> IntArray:
    return np.zeros(count, np.int64)
