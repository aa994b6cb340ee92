"""A device without a model: plays launches against a hidden true text and answers them late, in order.

It keeps its own truth per slot and its own KV pages, exactly as the device does. The content of a place is a hash of
all tokens up to it, of the request's salt and of the cache generation, and every launch checks what it would attend
to. So a scheduler that reads an answer of the wrong epoch, loses one, counts one twice, or lets requests share, evict
or overwrite the wrong page is found by comparing texts and contents. A drafter with KV of its own on the same pages is
played along: it is one token ahead, and it writes `lookahead` places past the newest token.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping

import numpy as np

from graphspec.records.launch import DecodeRows, PageTable, PrefillRows, RowResults, StepPlan, StepResult
from graphspec.records.request import Request
from graphspec.scheduling.result_processor import Emission
from graphspec.scheduling.scheduler import Scheduler

VOCAB = 50


Places = dict[tuple[int, int], int]  # (page, offset) -> content


def true_token(request_seed: int, position: int) -> int:
    """The token the target would draw for this key: what every run of the request must deliver."""
    return random.Random(request_seed * 1_000_003 + position).randrange(3, VOCAB)


class FakeSlot:
    """Device truth of one slot: its request, and the content hash of every position."""

    def __init__(self, request: Request, token_ids: list[int], generation: int) -> None:
        self.request = request
        self.contents: list[int] = []
        self._parent = hash((request.cache_salt, generation))
        self.extend(token_ids)
        self.computed = len(token_ids) - 1

    def extend(self, token_ids: list[int]) -> None:
        for token in token_ids:
            self._parent = hash((self._parent, token))
            self.contents.append(self._parent)


class FakeRunner:
    """Answers plans in launch order. `acceptance` is the chance that a draft is accepted."""

    def __init__(self, scheduler: Scheduler, seed: int, acceptance: float, requests: Mapping[int, Request]) -> None:
        self._scheduler = scheduler
        self._random = random.Random(seed)
        self._acceptance = acceptance
        self._requests = requests  # by seed
        self._slots: dict[int, FakeSlot] = {}
        self._places: Places = {}
        self._drafter_places: Places = {}
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()

    @property
    def plans(self) -> list[StepPlan]:
        return [plan for plan, _ in self.in_flight]

    def launch(self, plan: StepPlan) -> None:
        """Stream order: admissions, prefill, decode. The outcome is fixed here and told later."""
        for admission in plan.admissions:
            generation = self._scheduler.pool.generation
            request, tokens = self._requests[admission.seed], admission.token_ids.tolist()
            self._slots[admission.slot] = FakeSlot(request, tokens, generation)
        assert plan.prefill is None or plan.catch_up is None
        if plan.catch_up is not None:
            self._catch_up(plan.catch_up)
        prefill = None if plan.prefill is None else self._prefill(plan.prefill, plan.num_draft_next)
        decode = None if plan.decode is None else self._decode(plan.decode, plan.num_draft_next)
        self.in_flight.append((plan, StepResult(prefill, decode)))

    def answer(self) -> list[Emission]:
        plan, result = self.in_flight.popleft()
        emissions = self._scheduler.commit(plan, result)
        for emission in emissions:
            check_text(emission.request)
        return emissions

    def _catch_up(self, rows: PrefillRows) -> None:
        """The drafter reads tokens that are certain, at the places of the target's KV."""
        for i, (slot, start, length) in enumerate(zip(rows.slots, rows.starts, rows.lengths, strict=True)):
            contents = self._slots[int(slot)].contents
            assert start + length <= len(contents), "the drafter would read what does not exist yet"
            for position in range(int(start), int(start + length)):
                self._write(self._drafter_places, rows.page_table, i, position, contents[position])

    def _prefill(self, rows: PrefillRows, num_draft_next: int) -> RowResults:
        ends = (rows.starts + rows.lengths).tolist()
        for i, slot in enumerate(rows.slots.tolist()):
            contents = self._slots[slot].contents
            for position in range(int(rows.starts[i]), ends[i]):
                for places in (self._places, self._drafter_places):
                    self._write(places, rows.page_table, i, position, contents[position])
        tokens = []
        for i, slot in enumerate(rows.slots.tolist()):  # every row is stored before any row attends
            state = self._slots[slot]
            self._check_reads(self._places, rows.page_table, i, state, ends[i])
            token = true_token(state.request.seed, ends[i])
            tokens.append([token])
            if rows.final[i]:
                state.extend([token])
                state.computed = ends[i]
                self._draft(rows.page_table, i, state, range(ends[i], ends[i] + 1), num_draft_next)
        ones = np.ones(len(tokens), np.int64)
        return RowResults(ones, ones, np.array(ends) - 1, 0 * ones, np.array(tokens, np.int64))

    def _decode(self, rows: DecodeRows, num_draft_next: int) -> RowResults:
        width = 1 + rows.num_draft
        emitted, computed, tokens = [], [], []
        for i, (slot, bound) in enumerate(zip(rows.slots.tolist(), rows.computed_bound.tolist(), strict=True)):
            state = self._slots[slot]
            start = state.computed
            assert start <= bound, "the scheduler's upper bound is below the truth"
            count = 1
            while count < width and self._random.random() < self._acceptance:
                count += 1
            row = [true_token(state.request.seed, start + 1 + j) for j in range(count)]
            state.extend(row)
            for j in range(width):  # the newest token, accepted drafts, and the garbage of rejected ones
                content = state.contents[start + j] if j < count else self._random.random().__hash__()
                self._write(self._places, rows.page_table, i, start + j, content)
            if start < state.request.limit:
                self._check_reads(self._places, rows.page_table, i, state, start + 1)
            self._draft(rows.page_table, i, state, range(start + 1, start + 1 + width), num_draft_next)
            emitted.append(count)
            computed.append(start)
            tokens.append(row + [-1] * (width - count))
            state.computed = start + count
        full = np.full(len(emitted), width, np.int64)
        accepted = np.array(emitted) - 1
        return RowResults(accepted + 1, full, np.array(computed), accepted, np.array(tokens, np.int64))

    def _draft(self, page_table: PageTable, row: int, state: FakeSlot, new: range, num_draft_next: int) -> None:
        """The drafter takes in the tokens at `new`, garbage behind the newest one, and drafts on."""
        config, limit, newest = self._scheduler.config, state.request.limit, len(state.contents) - 1
        if not config.reads_prompt or not num_draft_next:
            return
        lookahead = min(config.lookahead, num_draft_next - 1)
        for position in (*new, *range(newest + 1, newest + 1 + lookahead)):
            content = state.contents[position] if position <= newest else self._random.random().__hash__()
            self._write(self._drafter_places, page_table, row, position, content)
        self._check_reads(self._drafter_places, page_table, row, state, min(newest + 1, limit))
        for position in range(newest + 1, min(newest + 1 + lookahead, limit)):
            page = page_table[row, position // config.page_size]
            assert page != self._scheduler.pool.scratch_page, "a draft would be stored on the scratch page"

    def _write(self, places: Places, page_table: PageTable, row: int, position: int, content: int) -> None:
        page, offset = divmod(position, self._scheduler.config.page_size)
        places[int(page_table[row, page]), offset] = content

    def _check_reads(self, places: Places, page_table: PageTable, row: int, state: FakeSlot, length: int) -> None:
        size, pages = self._scheduler.config.page_size, page_table[row].tolist()
        for position in range(length):
            page, offset = divmod(position, size)
            assert pages[page] != self._scheduler.pool.scratch_page, "a certain token would read the scratch page"
            assert places[pages[page], offset] == state.contents[position], "a row would attend to wrong KV"


def check_text(request: Request) -> None:
    """Every delivered token is the true one at its position: in order, none lost, none twice, none of a stranger."""
    start = len(request.prompt_ids)
    expected = [true_token(request.seed, start + i) for i in range(len(request.output_ids))]
    assert request.output_ids == expected, f"request {request.request_id}: {request.output_ids} is not {expected}"
