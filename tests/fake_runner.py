"""A device without a model: plays launches against a hidden true text and answers them late, in order.

It keeps its own truth per slot, exactly as the device does, so a scheduler that reads an answer of the wrong epoch,
loses one or counts one twice is found by comparing texts.
"""

from __future__ import annotations

import random
from collections import deque

import numpy as np

from graphspec.request import Request
from graphspec.scheduler import Scheduler
from graphspec.step import DecodeRows, PrefillRows, RowResults, StepPlan, StepResult

VOCAB = 50


def true_token(request_seed: int, position: int) -> int:
    """The token the target would draw for this key: what every run of the request must deliver."""
    return random.Random(request_seed * 1_000_003 + position).randrange(3, VOCAB)


class FakeRunner:
    """Answers plans in launch order. `acceptance` is the chance that a draft is accepted."""

    def __init__(self, scheduler: Scheduler, seed: int, acceptance: float) -> None:
        self._scheduler = scheduler
        self._random = random.Random(seed)
        self._acceptance = acceptance
        self._computed: dict[int, int] = {}  # slot -> computed tokens, the device truth
        self._seed: dict[int, int] = {}
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()

    @property
    def plans(self) -> list[StepPlan]:
        return [plan for plan, _ in self.in_flight]

    def launch(self, plan: StepPlan) -> None:
        """Stream order: admissions, prefill, decode. The outcome is fixed here and told later."""
        for admission in plan.admissions:
            self._computed[admission.slot] = len(admission.token_ids) - 1
            self._seed[admission.slot] = admission.seed
        prefill = None if plan.prefill is None else self._prefill(plan.prefill)
        decode = None if plan.decode is None else self._decode(plan.decode)
        self.in_flight.append((plan, StepResult(prefill, decode)))

    def _prefill(self, rows: PrefillRows) -> RowResults:
        computed = rows.starts + rows.lengths - 1
        tokens = [[true_token(self._seed[s], int(c) + 1)] for s, c in zip(rows.slots.tolist(), computed, strict=True)]
        for slot, last, final in zip(rows.slots.tolist(), computed.tolist(), rows.final.tolist(), strict=True):
            if final:
                self._computed[slot] = last + 1
        ones = np.ones(len(rows.slots), np.int64)
        return RowResults(ones, ones, computed, np.array(tokens, np.int64))

    def _decode(self, rows: DecodeRows) -> RowResults:
        width = 1 + rows.num_draft
        emitted, computed, tokens = [], [], []
        for slot, bound in zip(rows.slots.tolist(), rows.computed_bound.tolist(), strict=True):
            start = self._computed[slot]
            assert start <= bound, "the scheduler's upper bound is below the truth"
            count = 1
            while count < width and self._random.random() < self._acceptance:
                count += 1
            row = [true_token(self._seed[slot], start + 1 + i) for i in range(count)]
            emitted.append(count)
            computed.append(start)
            tokens.append(row + [-1] * (width - count))
            self._computed[slot] = start + count
        full = np.full(len(emitted), width, np.int64)
        return RowResults(np.array(emitted), full, np.array(computed), np.array(tokens, np.int64))

    def answer(self) -> None:
        plan, result = self.in_flight.popleft()
        for emission in self._scheduler.commit(plan, result):
            check_text(emission.request)


def check_text(request: Request) -> None:
    """Every delivered token is the true one at its position: in order, none lost, none twice, none of a stranger."""
    start = len(request.prompt_ids)
    expected = [true_token(request.seed, start + i) for i in range(len(request.output_ids))]
    assert request.output_ids == expected, f"request {request.request_id}: {request.output_ids} is not {expected}"
