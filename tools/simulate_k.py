"""Adaptive k against every fixed k on a recorded load, without a device: deterministic, in seconds.

    python tools/simulate_k.py --record load.json --prompts-file mt_bench.jsonl --num-prompts 24
    python tools/simulate_k.py --load load.json --concurrency 1 4 16

A record holds what does not depend on k: for every prompt its length and, for each token of its answer, how many of the
drafts that n-grams propose behind it are right; and the measured time of decode steps by rows and k. The simulation
drives the real scheduler, one launch ahead, against a clock that moves by those times. So it shows what the policy
chooses and what that is worth, apart from the noise of a machine; prompts cost no time in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graphspec.records.launch import DecodeRows, PrefillRows, RowResults, StepPlan, StepResult
from graphspec.records.request import Request
from graphspec.records.sampling_params import SamplingParams
from graphspec.scheduling.scheduler import Scheduler, SchedulerConfig

PAGE_SIZE, LONGEST = 16, 4096


@dataclass(frozen=True)
class Answer:
    """One prompt of a load: its tokens, and behind every token of the answer how many drafts were right."""

    prompt_tokens: int
    right: list[int]


@dataclass(frozen=True)
class Load:
    answers: list[Answer]
    costs: dict[tuple[int, int], float]  # seconds of a step by (rows, k)

    def seconds(self, rows: int, k: int) -> float:
        """Between measured steps, by the number of rows, for equal k."""
        known = sorted((r, seconds) for (r, own), seconds in self.costs.items() if own == k)
        return float(np.interp(rows, [r for r, _ in known], [seconds for _, seconds in known]))

    @property
    def tiers(self) -> tuple[int, ...]:
        return tuple(sorted({k for _, k in self.costs}))


def read_load(path: Path) -> Load:
    raw = json.loads(path.read_text())
    costs = {(rows, k): seconds for rows, k, seconds in raw["costs"]}
    return Load([Answer(a["prompt_tokens"], list(map(int, a["right"]))) for a in raw["answers"]], costs)


class Machine:
    """How fast steps run: for 5 seconds on average at one pace, which is up to `drift` slower than a load says, then at
    another, and each step up to `NOISE` off. What is seen; the clock that tokens per second are of does not drift."""

    NOISE = 0.05

    def __init__(self, drift: float) -> None:
        self._drift, self._random, self._pace = drift, random.Random(1), 1.0

    def seen(self, seconds: float) -> float:
        if self._random.random() < seconds / 5.0:
            self._pace = 1.0 + self._drift * self._random.random()
        return seconds * self._pace * (1.0 + self.NOISE * self._random.uniform(-1, 1) * (self._drift > 0))


class RecordedDevice:
    """Answers launches from a load, one launch late, and keeps the time they took."""

    def __init__(self, load: Load, scheduler: Scheduler, answers: dict[int, Answer], machine: Machine) -> None:
        self._load, self._scheduler, self._answers, self._machine = load, scheduler, answers, machine
        self._slots: dict[int, tuple[Answer, int]] = {}  # answer, tokens known of it
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.seconds = 0.0

    def launch(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            self._slots[admission.slot] = self._answers[admission.seed], 0
        prefill = None if plan.prefill is None else self._prefill(plan.prefill)
        seconds = None
        if plan.decode is not None:
            seconds = self._load.seconds(len(plan.decode.slots), plan.decode.num_draft)
            self.seconds += seconds
        decode = None if plan.decode is None else self._decode(plan.decode)
        seen = None if seconds is None else self._machine.seen(seconds)
        alone = seen if plan.prefill is None and not plan.admissions else None
        self.in_flight.append((plan, StepResult(prefill, decode, seconds=alone)))

    def _prefill(self, rows: PrefillRows) -> RowResults:
        for slot in rows.slots[rows.final].tolist():
            self._slots[slot] = self._slots[slot][0], 1
        ones = np.ones(len(rows.slots), np.int64)
        return RowResults(ones, ones, rows.starts + rows.lengths - 1, 0 * ones, ones[:, None] + 2)

    def _decode(self, rows: DecodeRows) -> RowResults:
        emitted, matching, computed = (np.zeros(len(rows.slots), np.int64) for _ in range(3))
        for i, slot in enumerate(rows.slots.tolist()):
            answer, known = self._slots[slot]
            right = answer.right[known - 1] if known <= len(answer.right) else 0
            computed[i] = answer.prompt_tokens + known - 1
            matching[i] = min(right, rows.num_draft + 1)
            emitted[i] = 1 + min(right, rows.num_draft)
            self._slots[slot] = answer, known + int(emitted[i])
        width = 1 + rows.num_draft
        tokens = np.where(np.arange(width) < emitted[:, None], 3, -1)
        return RowResults(emitted, np.full(len(emitted), width), computed, matching, tokens)

    def answer(self) -> int:
        """Requests that ended with the oldest launch."""
        plan, result = self.in_flight.popleft()
        return sum(e.finish_reason is not None for e in self._scheduler.commit(plan, result))


def simulate(
    load: Load, phases: Sequence[tuple[int, Sequence[Answer]]], tiers: tuple[int, ...], drift: float = 0.0
) -> float:
    """Tokens per second of the load's clock, closed loop, for phases of (concurrency, answers)."""
    rows = max(concurrency for concurrency, _ in phases)
    pages = rows * LONGEST // PAGE_SIZE
    # A budget as large as this admits requests as they come; prompts take no time.
    limits = SchedulerConfig(rows, rows * LONGEST, tiers, 0, PAGE_SIZE, pages, 2 * LONGEST // PAGE_SIZE)
    scheduler, answers = Scheduler(limits), dict[int, Answer]()
    for size in (1, rows):  # what an engine measures when it starts
        for k in tiers:
            scheduler.policy.costs.record_profiled(size, k, load.seconds(size, k))
    device = RecordedDevice(load, scheduler, answers, Machine(drift))
    tokens = 0
    for concurrency, wanted in phases:
        waiting, running = deque(wanted), 0
        while waiting or running:
            while waiting and running < concurrency:
                number, answer = len(answers), waiting.popleft()
                answers[number] = answer
                scheduler.add(request_of(number, answer))
                tokens += len(answer.right)
                running += 1
            plan = scheduler.next()
            if plan is not None:
                device.launch(plan)
            while device.in_flight and (plan is None or len(device.in_flight) > 1):
                running -= device.answer()
    return tokens / device.seconds


def request_of(number: int, answer: Answer) -> Request:
    length = len(answer.right)
    prompt = [3 + number % 100] + [3] * (answer.prompt_tokens - 1)
    limit = answer.prompt_tokens + length
    return Request(str(number), prompt, SamplingParams(max_tokens=length), number, number, limit, frozenset())


def compare(load: Load, phases: Sequence[tuple[int, Sequence[Answer]]], drift: float = 0.0) -> dict[str, float]:
    """Tokens per second with every fixed k, and with all of them to choose among."""
    found = {f"k = {k}": simulate(load, phases, (k,)) for k in load.tiers}
    return {**found, "adaptive": simulate(load, phases, load.tiers, drift)}


def num_right(token_ids: list[int], num_prompt: int, max_draft: int) -> list[int]:
    """Behind every token of the answer, how many leading drafts of the n-gram drafter are the tokens that follow."""
    import torch

    from graphspec import EngineConfig
    from graphspec.drafting import DraftInputs, NgramDrafter
    from graphspec.sampling.verification import leading_matches

    defaults, every = EngineConfig(), torch.tensor(token_ids)
    drafter = NgramDrafter(defaults.ngram_min, defaults.ngram_max)
    found = []
    for newest in range(num_prompt, len(token_ids)):
        place = torch.tensor([newest])
        known: Any = dataclasses.make_dataclass("Known", ["history", "newest"])(every[None], place)
        inputs: DraftInputs = known  # all that this drafter reads
        drafts = drafter.propose(inputs, max_draft).token_ids
        follows = every[None, newest + 1 : newest + 1 + max_draft]
        found.append(int(leading_matches(drafts, follows)))
    return found


def record_answers(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Answer the prompts, greedily."""
    from graphspec import Engine, EngineConfig
    from graphspec.commands.prompt_files import read_prompts

    k, texts = max(args.tiers), [p for path in args.prompts_file for p in read_prompts(path, args.num_prompts)]
    with Engine.from_pretrained(args.model, EngineConfig(num_speculative_tokens=k, max_model_len=2048)) as engine:
        chats = [engine.encode([{"role": "user", "content": text}]) for text in texts]
        done = engine.generate(chats, SamplingParams(max_tokens=args.max_tokens))
    return [
        {"prompt_tokens": len(p), "right": "".join(map(str, num_right(p + c.token_ids, len(p), k)))}
        for p, c in zip(chats, done, strict=True)
    ]


def measure_costs(args: argparse.Namespace) -> list[tuple[int, int, float]]:
    """Median seconds of greedy decode steps."""
    from graphspec import Engine, EngineConfig

    config = EngineConfig(
        num_speculative_tokens=max(args.tiers), adaptive_speculation=True, speculation_tiers=tuple(args.tiers),
        max_num_seqs=max(args.rows), max_model_len=2048,
    )  # fmt: skip
    with Engine.from_pretrained(args.model, config) as engine:
        runner = engine._runner
        keys = [runner.graph_plan.key(rows, k, max(args.tiers), "greedy") for rows in args.rows for k in args.tiers]
        runner.on_stream(lambda: [runner.decode_step.capture(k) for k in keys if k not in runner.decode_step.store])
        taken = runner.rehearse(keys, args.repeats)
    return [(key.rows, key.num_draft, float(np.median(own))) for key, own in taken.items()]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=Path, help="a record to play")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--drift", type=float, default=0.0, help="the machine is up to this share slower for a while")
    parser.add_argument("--record", type=Path, help="write a record here")
    parser.add_argument("--prompts-file", type=Path, nargs="+", default=[])
    parser.add_argument("--num-prompts", type=int, help="of each file")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--tiers", type=int, nargs="+", default=[0, 1, 3, 5])
    parser.add_argument("--repeats", type=int, default=12, help="measurements of a step")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args(arguments)
    if args.record is not None:
        written = {"costs": measure_costs(args), "answers": record_answers(args)}
        args.record.write_text(json.dumps(written) + "\n")
    if args.load is not None:
        load = read_load(args.load)
        for concurrency in args.concurrency:
            found = compare(load, [(concurrency, load.answers)], args.drift)
            best = max(value for name, value in found.items() if name != "adaptive")
            line = "  ".join(f"{name}: {value:7.1f}" for name, value in found.items())
            print(
                f"{concurrency:>4} at once, tokens/s   {line}   adaptive / best fixed: {found['adaptive'] / best:.3f}"
            )


if __name__ == "__main__":
    main()
