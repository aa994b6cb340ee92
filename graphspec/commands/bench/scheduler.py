"""Measure the host's time per step with a fake device: schedule + staging + commit, in steady state.

    graphspec bench scheduler                                           the table
    graphspec bench scheduler --requests 256 --num-draft 3 --json       one JSON line

`host_us_per_request` is the median over steps of all three parts, divided by the number of running requests. Staging
is the real one (`StagingRing`: fill the arrays of a launch, read its answer back).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from graphspec.commands.command import Command
from graphspec.commands.provenance import provenance
from graphspec.execution.iteration import OUTPUT_HEADER
from graphspec.execution.staging import StagedStep, StagingRing, StagingSizes, read_rows
from graphspec.records.launch import StepPlan, StepResult
from graphspec.records.request import Request
from graphspec.records.sampling_params import SamplingParams
from graphspec.scheduling.scheduler import Scheduler, SchedulerConfig

PAGE_SIZE, DEPTH = 16, 1


@dataclass(frozen=True)
class Sample:
    schedule: float
    staging: float
    commit: float

    @property
    def total(self) -> float:
        return self.schedule + self.staging + self.commit


class FakeDevice:
    """Writes plausible answers into the staging arrays, at no host time that is counted: about half of the drafts
    are accepted, no request ends."""

    def __init__(self, num_draft: int, slots: int) -> None:
        self._num_draft = num_draft
        self._computed = np.zeros(slots, np.int64)
        self._random = np.random.default_rng(0)

    def answer(self, plan: StepPlan, staged: StagedStep) -> None:
        for admission in plan.admissions:
            self._computed[admission.slot] = len(admission.token_ids) - 1
        if plan.prefill is not None:
            out = staged.prefill_output.numpy()[: len(plan.prefill.slots)]
            ends = plan.prefill.starts + plan.prefill.lengths
            out[:, 0], out[:, 1], out[:, 2], out[:, 3], out[:, OUTPUT_HEADER] = 1, 1, ends - 1, 0, 7
            self._computed[plan.prefill.slots[plan.prefill.final]] = ends[plan.prefill.final]
        if plan.decode is not None:
            rows = plan.decode.slots
            out = staged.decode_output.numpy()[: len(rows)]
            emitted = self._random.integers(1, self._num_draft + 2, len(rows))
            out[:, 0], out[:, 1], out[:, 2] = emitted, 1 + self._num_draft, self._computed[rows]
            out[:, 3] = emitted - 1
            out[:, OUTPUT_HEADER:] = np.where(np.arange(1 + self._num_draft) < emitted[:, None], 9, -1)
            self._computed[rows] += emitted


def measure(requests: int, num_draft: int, prompt: int, steps: int) -> dict[str, float]:
    """Medians in microseconds over `steps` steps of a steady batch, one launch in flight."""
    room = prompt + (steps + 40) * (1 + num_draft)
    width = -(-(room + 3 * (1 + num_draft)) // PAGE_SIZE)
    pages = requests * width
    scheduler = Scheduler(SchedulerConfig(requests, requests * prompt, (num_draft,), 0, PAGE_SIZE, pages, width))
    ring = StagingRing(StagingSizes(requests, requests * prompt, width, num_draft, requests, pages), DEPTH, pin=False)
    device = FakeDevice(num_draft, requests)
    for i in range(requests):
        params = SamplingParams(max_tokens=room - prompt)
        scheduler.add(Request(str(i), [3 + i % 100] * prompt, params, i, i, room, frozenset({2})))
    in_flight: list[tuple[StepPlan, StagedStep]] = []
    samples = []
    gc.collect()
    gc.freeze()
    for step in range(steps + 20):
        t0 = time.perf_counter()
        plan = scheduler.next()
        t1 = time.perf_counter()
        assert plan is not None
        staged = ring.take()
        if plan.prefill is not None:
            staged.fill_prefill(plan.prefill)
        if plan.decode is not None:
            staged.fill_decode(plan.decode, requests)
        t2 = time.perf_counter()
        device.answer(plan, staged)
        in_flight.append((plan, staged))
        if len(in_flight) <= DEPTH:
            continue
        done, arrays = in_flight.pop(0)
        t3 = time.perf_counter()
        prefill = None if done.prefill is None else read_rows(arrays.prefill_output, len(done.prefill.slots), 1)
        decode = None if done.decode is None else read_rows(arrays.decode_output, len(done.decode.slots), 1 + num_draft)
        t4 = time.perf_counter()
        scheduler.commit(done, StepResult(prefill, decode))
        t5 = time.perf_counter()
        if step >= 20:
            samples.append(Sample(t1 - t0, t2 - t1 + t4 - t3, t5 - t4))
    parts = {
        name: statistics.median(getattr(s, name) for s in samples) * 1e6 for name in ("schedule", "staging", "commit")
    }
    total = statistics.median(s.total for s in samples) * 1e6
    return {
        "host_us_per_request": total / requests,
        "host_us_per_step": total,
        **{f"{name}_us": value for name, value in parts.items()},
    }


def run_command(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    if not args.json:
        names = ("us/step", "schedule", "staging", "commit")
        print(f"{'requests':>8} {'k':>3} {'prompt':>7} {'us/request':>11} " + " ".join(f"{name:>9}" for name in names))
    for prompt, k, requests in itertools.product(args.prompt_tokens, args.num_draft, args.requests):
        row = measure(requests, k, prompt, args.steps)
        config = {"requests": requests, "num_draft": k, "prompt_tokens": prompt, "steps": args.steps}
        if args.json:
            line = {"tool": "bench_scheduler", **provenance("cpu", None), "config": config, **row}
            print(json.dumps(line), flush=True)
        else:
            values = [row[n] for n in ("host_us_per_step", "schedule_us", "staging_us", "commit_us")]
            print(f"{requests:>8} {k:>3} {prompt:>7} {row['host_us_per_request']:>11.2f} "
                  + " ".join(f"{v:>9.1f}" for v in values), flush=True)  # fmt: skip
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `graphspec bench scheduler` takes."""
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--num-draft", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[256])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")


COMMAND = Command(__doc__, add_arguments, run_command)
