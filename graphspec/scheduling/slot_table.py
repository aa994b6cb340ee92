"""What the host knows about each slot, as a structure of arrays: per-row work is vectorised, no objects in loops."""

from __future__ import annotations

import numpy as np

from graphspec.records.launch import IntArray, PageTable
from graphspec.records.request import Request

FREE, PREFILL, DECODE = 0, 1, 2
UNREAD_NONE = np.iinfo(np.int64).max


class SlotTable:
    """Host facts of S slots. Every array is indexed by slot.

    phase           FREE, PREFILL or DECODE
    epoch           bumped whenever the slot changes hands; answers of an older epoch are dropped
    settled         tokens whose acceptance the host has seen, prompt included
    placeholders    output positions in flight
    sampling        launches in flight that will emit at least one token
    prefilled       tokens covered by cached pages and launched prefill chunks
    cached, published   leading pages taken from the prefix cache; leading pages whose content was made known to it
    limit           most tokens the request may reach
    min_length      no stop rule applies before this many tokens, prompt included
    watched         the request has stop strings
    decode_steps, off_graph_steps   answered decode steps of the request in this slot; those that replayed no graph
    speculates      drafts are accepted for the request
    unread          tokens from this position on have not been read by the drafter; UNREAD_NONE: it keeps up
    unread_known    `unread` is exact; otherwise a launch in flight decides, and it is a lower bound
    scored_to       prompt positions below this return the log-probability of the token after them; 0: none is asked
                    for, or all are known
    rank            order of service, see `Request.rank`
    needs           SamplerNeeds of the request
    last_step       newest launch that holds the slot, the fence of its pages
    num_pages, page_table [S, P]   pages owned; the other entries hold the scratch page
    """

    def __init__(self, num_slots: int, table_width: int, scratch_page: int) -> None:
        self.num_slots = num_slots
        self.scratch_page = scratch_page
        self.phase = np.zeros(num_slots, np.int8)
        self.epoch, self.settled, self.placeholders, self.sampling = (_zeros(num_slots) for _ in range(4))
        self.prefilled, self.limit, self.rank, self.needs = (_zeros(num_slots) for _ in range(4))
        self.min_length, self.cached, self.published, self.scored_to = (_zeros(num_slots) for _ in range(4))
        self.decode_steps, self.off_graph_steps = (_zeros(num_slots) for _ in range(2))
        self.watched, self.speculates, self.unread_known = (np.zeros(num_slots, np.bool_) for _ in range(3))
        self.unread = np.full(num_slots, UNREAD_NONE, np.int64)
        self.last_step = np.full(num_slots, -1, np.int64)
        self.num_pages = _zeros(num_slots)
        self.page_table: PageTable = np.full((num_slots, table_width), scratch_page, np.int32)
        self.stop_ids: IntArray = np.full((num_slots, 1), -1, np.int64)  # padded with -1, which is no token
        self.request: list[Request | None] = [None] * num_slots
        self._unused = list(range(num_slots - 1, -1, -1))

    @property
    def num_unused(self) -> int:
        return len(self._unused)

    def occupy(self, request: Request, pages: list[int], cached: int, page_size: int, *, may_skip: bool) -> int:
        """Give a free slot to `request`, which owns `pages`; the content of the first `cached` is already there.
        `may_skip`: the last token needs no prefill. The caller has checked `num_unused`."""
        slot = self._unused.pop()
        request.slot = slot
        self.request[slot] = request
        self.settled[slot] = request.num_tokens
        self.cached[slot] = self.published[slot] = cached
        self.prefilled[slot] = cached * page_size
        # With one token left to compute there is nothing to prefill: that token is what a decode step starts from.
        self.phase[slot] = DECODE if may_skip and self.settled[slot] - self.prefilled[slot] == 1 else PREFILL
        self.limit[slot] = request.limit
        self.min_length[slot] = len(request.prompt_ids) + request.params.min_tokens
        self.watched[slot] = bool(request.params.stop)
        self.speculates[slot] = request.params.speculation
        self.scored_to[slot] = len(request.prompt_ids) - 1 if request.wants_prompt_logprobs else 0
        self.rank[slot] = request.rank
        self.needs[slot] = int(request.params.needs)
        if len(request.stop_ids) > self.stop_ids.shape[1]:
            extra = len(request.stop_ids) - self.stop_ids.shape[1]
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, extra)), constant_values=-1)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(request.stop_ids)] = sorted(request.stop_ids)
        self.append_pages(slot, pages)
        return slot

    def append_pages(self, slot: int, pages: list[int]) -> None:
        owned = int(self.num_pages[slot])
        self.page_table[slot, owned : owned + len(pages)] = pages
        self.num_pages[slot] = owned + len(pages)

    def share_out(self, pages: list[int], slots: IntArray, counts: IntArray) -> None:
        """Append to each of `slots` its count of `pages`, in order."""
        which = np.repeat(np.arange(len(slots)), counts)
        place = np.arange(len(pages)) - (counts.cumsum() - counts)[which]
        self.page_table[slots[which], self.num_pages[slots][which] + place] = pages
        self.num_pages[slots] += counts

    def pages(self, slot: int) -> list[int]:
        owned: list[int] = self.page_table[slot, : self.num_pages[slot]].tolist()
        return owned

    def vacate(self, slot: int) -> None:
        """The one reset of a slot (finish, abort, preemption)."""
        request = self.request[slot]
        assert request is not None
        request.slot = None
        request.num_decode_steps += int(self.decode_steps[slot])
        request.num_off_graph_steps += int(self.off_graph_steps[slot])
        self.request[slot] = None
        self.phase[slot] = FREE
        self.epoch[slot] += 1
        for array in (self.settled, self.placeholders, self.sampling, self.prefilled, self.limit, self.num_pages):
            array[slot] = 0
        self.cached[slot] = self.published[slot] = self.decode_steps[slot] = self.off_graph_steps[slot] = 0
        self.last_step[slot] = -1
        self.unread[slot] = UNREAD_NONE
        self.page_table[slot] = self.scratch_page
        self._unused.append(slot)


def _zeros(count: int) -> IntArray:
    return np.zeros(count, np.int64)
