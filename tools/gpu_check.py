"""One command that says whether graphspec works on a GPU, and how fast.

    python tools/gpu_check.py --budget-s 270 --out out/gpu_check
    PYTHONPATH=out/kernels python tools/gpu_check.py        # with FlashInfer modules built by tools/build_kernels.py

Needs nothing from the network: the models have random weights in the shapes of SmolLM2-135M, Llama-3.1-8B and Qwen3-8B.
Checks come in order of value, each line is written to `rows.jsonl` as it is measured, and what the budget leaves out is
named at the end. Exit code 1 if a check failed. `--tiny` runs everything on the CPU in small, to test this script.

    attention   every backend against the float32 reference, lengths and inputs changed within one captured graph
    graph       decode steps on graphs against `enforce_eager`: equal tokens
    depth       scheduler one step ahead against synchronous, forced and n-gram drafts: equal tokens
    step        time of a decode step, gap before its launch, ratio to the bound of speed_of_light.py
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attention_step import AttentionStep
from bench_common import provenance
from decode_load import decoding, timed_steps, tokens_needed
from speed_of_light import Rates, StepBound, measured_rates, seconds_of
from torch import nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from transformers import AutoConfig, AutoModelForCausalLM

from attention import AttentionShape, AttentionSpec, Machine, create_backend
from attention.flashinfer_guards import NAMES, missing, unsupported
from graphspec import Engine, EngineConfig, SamplingParams

# Largest error of a bfloat16 attention output, as a share of the largest value: four units in the last place.
MAX_ERROR = 2.0**-6
LENGTH_SETS = 6  # replays of one graph with new lengths and new inputs
PROMPT = 32  # tokens before the decode steps that are timed

MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "Qwen3-8B": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "tie_word_embeddings": True,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What to check: on a GPU, or in small on the CPU."""

    device: torch.device
    dtype: torch.dtype
    models: tuple[str, ...]
    rows: tuple[int, ...]
    drafts: tuple[int, ...]
    max_model_len: int
    steps: int
    compile: bool


Row = dict[str, Any]


class Report:
    """Lines as they are measured, and what failed or was not reached."""

    def __init__(self, out: Path, budget: float, device: str, dtype: torch.dtype) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._out, self._budget, self._started = out, budget, time.perf_counter()
        self._file = (out / "rows.jsonl").open("w", encoding="utf-8")
        self._provenance = provenance(device, dtype)
        self.rows: list[Row] = []
        self.skipped: list[str] = []

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if not row["ok"]]

    def run(self, name: str, check: Callable[[], Row]) -> None:
        """One check, unless the time is up. A check that raises is a failed line; the others go on."""
        seconds = time.perf_counter() - self._started
        if seconds > self._budget:
            self.skipped.append(name)
            return
        try:
            row = check()
        except Exception as caught:
            row = {"ok": False, "error": f"{type(caught).__name__}: {caught}"[:500]}
            traceback.print_exc()
        row = {"check": name, "at_s": round(seconds, 1), **row}
        self.rows.append(row)
        self._file.write(json.dumps({"tool": "gpu_check", **self._provenance, **row}) + "\n")
        self._file.flush()
        print(f"{seconds:>6.1f} s  {'ok  ' if row['ok'] else 'FAIL'}  {name:<52} {_brief(row)}", flush=True)
        gc.collect()  # engines hold memory in cycles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def close(self) -> None:
        self._file.close()
        lines = ["| check | ok | " + " |", "| --- | --- | --- |"]
        lines += [f"| {row['check']} | {'yes' if row['ok'] else 'NO'} | {_brief(row)} |" for row in self.rows]
        lines += [f"| {name} | not reached | |" for name in self.skipped]
        facts = ", ".join(self._provenance.values())
        (self._out / "table.md").write_text(f"{facts}\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


def _brief(row: Row) -> str:
    hidden = ("check", "at_s", "ok", "bucket")
    return ", ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if k not in hidden
    ).replace("|", "/")


# Attention.


def attention_shape(plan: Plan, name: str, page_size: int = 16) -> AttentionShape:
    facts = MODELS[name]
    heads = facts["num_attention_heads"]
    head_dim = facts.get("head_dim", facts["hidden_size"] // heads)
    width = -(-plan.max_model_len // page_size)
    spec = AttentionSpec(head_dim**-0.5)
    return AttentionShape(
        heads, facts["num_key_value_heads"], head_dim, page_size, width, plan.dtype, plan.device, (spec,)
    )


def machine(rates: Rates) -> Row:
    found = {"read_gb_per_s": rates.bytes_per_s / 1e9, "gflop_per_s": rates.operations_per_s / 1e9}
    return {"ok": True, **found, "flashinfer": missing() or "found"}


def check_attention(plan: Plan, model: str, name: str, rows: int, query_len: int) -> Row:
    shape = attention_shape(plan, model)
    step = AttentionStep(shape, create_backend(name, shape), rows, query_len)
    longest = plan.max_model_len
    errors = [step.error(max(query_len, longest * (i + 1) // LENGTH_SETS)) for i in range(LENGTH_SETS)]
    step.set_lengths(torch.full((rows,), longest))
    seconds = seconds_of(step.graph.replay, plan.device, plan.steps)
    kv_bytes = 2 * rows * longest * shape.num_kv_heads * shape.head_dim * plan.dtype.itemsize
    worst = max(errors, key=lambda e: e if e == e else float("inf"))
    return {
        "ok": bool(worst <= MAX_ERROR), "error": worst, "us": 1e6 * seconds, "gb_per_s": kv_bytes / seconds / 1e9,
        "bucket": {"model": model, "backend": name, "rows": rows, "query_len": query_len},
    }  # fmt: skip


def choice_table(plan: Plan, measured: Iterable[Row]) -> list[dict[str, Any]]:
    """The fastest right FlashInfer backend of every bucket measured, as lines for `attention_table`. A line holds for
    the row counts from the next smaller measured one on."""
    best: dict[tuple[str, int, int], tuple[float, str]] = {}
    for row in measured:
        bucket = row.get("bucket")
        if bucket is not None and row["ok"] and bucket["backend"] in NAMES:
            key = (bucket["model"], bucket["query_len"], bucket["rows"])
            best[key] = min(best.get(key, (float("inf"), "")), (row["us"], bucket["backend"]))
    lines, below = [], ("", 0, 0)
    for model, query_len, rows in sorted(best):
        first = below[2] + 1 if below[:2] == (model, query_len) else 1
        below = (model, query_len, rows)
        shape = attention_shape(plan, model)
        lines.append({
            "rows": [first, rows], "query_len": [query_len, query_len], "num_heads": shape.num_heads,
            "num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim, "context": [0, shape.longest],
            "backend": best[below][1],
        })  # fmt: skip
    return lines


def backends(plan: Plan, model: str) -> list[str]:
    """The reference, and each FlashInfer backend that can serve a model here."""
    if plan.device.type != "cuda" or missing() is not None:
        return ["reference"]
    shape, machine = attention_shape(plan, model), Machine.of(plan.device)
    return [*(name for name in NAMES if unsupported(name, shape, machine) is None), "reference"]


# Engines.


class RandomModels:
    """Models with random weights; only one is kept at a time."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._name, self._module = "", nn.Module()

    def __call__(self, name: str) -> nn.Module:
        if name != self._name:
            self._name, self._module = "", nn.Module()
            gc.collect()
            torch.manual_seed(0)
            config = AutoConfig.for_model(**MODELS[name], max_position_embeddings=2 * self._plan.max_model_len)
            with torch.device(self._plan.device):
                module = AutoModelForCausalLM.from_config(config, dtype=self._plan.dtype)
            self._name, self._module = name, module.eval().requires_grad_(False)
        return self._module


def engine(models: RandomModels, plan: Plan, model: str, k: int, **config: Any) -> Engine:
    settings: dict[str, Any] = {
        "num_speculative_tokens": k,
        "max_num_seqs": max(plan.rows),
        "max_model_len": plan.max_model_len,
        "kv_memory_fraction": 0.5,
        "capture": "lazy",
        "compile": plan.compile,
        **({} if k else {"drafter": "none"}),
        **config,
    }
    return Engine(models(model), config=EngineConfig(**settings))


def prompts(plan: Plan, model: str, count: int, length: int) -> list[list[int]]:
    vocab = MODELS[model]["vocab_size"] - 10
    return [[5 + (7 * i + (j * j) % 97) % vocab for j in range(length + i % 5)] for i in range(count)]


def tokens(
    models: RandomModels, plan: Plan, model: str, k: int, rows: int, **config: Any
) -> tuple[list[list[int]], int]:
    """Texts of `rows` requests, and the number of decode steps that left their graph."""
    params = [SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8 * (i % 2), seed=i) for i in range(rows)]
    with engine(models, plan, model, k, **config) as made:
        done = made.generate(prompts(plan, model, rows, 40), params, progress=False)
        return [c.token_ids for c in done], made.stats().off_graph_decode_steps


def check_graph(models: RandomModels, plan: Plan, model: str, name: str, k: int, rows: int) -> Row:
    on, off_graph = tokens(models, plan, model, k, rows, depth=0, attention_backend=name, compile=False)
    eager, _ = tokens(models, plan, model, k, rows, depth=0, attention_backend=name, enforce_eager=True)
    same = sum(a == b for a, b in zip(on, eager, strict=True))
    return {"ok": same == rows and off_graph == 0, "same_texts": f"{same} of {rows}", "off_graph": off_graph}


def check_depth(models: RandomModels, plan: Plan, model: str, drafter: dict[str, Any], k: int, rows: int) -> Row:
    ahead, off_graph = tokens(models, plan, model, k, rows, depth=1, **drafter)
    settled, _ = tokens(models, plan, model, k, rows, depth=0, **drafter)
    same = sum(a == b for a, b in zip(ahead, settled, strict=True))
    return {"ok": same == rows and off_graph == 0, "same_texts": f"{same} of {rows}", "off_graph": off_graph}


def check_step(models: RandomModels, plan: Plan, model: str, k: int, rows: int, rates: Rates, **config: Any) -> Row:
    """Medians over steps in which `rows` requests decode."""
    drafter = {"drafter": "forced", "forced_num_accepted": k // 2} if k else {}
    with engine(models, plan, model, k, depth=1, **drafter, **config) as made:
        params = SamplingParams(max_tokens=tokens_needed(k, plan.steps + 4), ignore_eos=True)
        with decoding(made, prompts(plan, model, rows, PROMPT), params):
            turn = timed_steps(made, plan.steps)
            kernels = kernels_per_step(made) if plan.device.type == "cuda" else None
        bound = StepBound.of(rates, made)
    seconds, emitted = statistics.median(turn.busy), turn.emitted_per_row(rows)
    ratios = bound.ratios(seconds, rows, k, PROMPT + plan.steps * emitted / 2, emitted)
    return {
        "ok": True, "ms": 1e3 * seconds, **ratios, "gap_us": 1e6 * statistics.median(turn.idle),
        "host_us": 1e6 * statistics.median(turn.host), "kernels": kernels,
    }  # fmt: skip


def kernels_per_step(made: Engine) -> float:
    """Kernels, copies and fills per step, counted by the profiler over four steps."""
    steps = 4
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            made.step()
        torch.cuda.synchronize()
    return len([event for event in profile.events() or [] if event.device_type == DeviceType.CUDA]) / steps


# The order of checks.


def checks(plan: Plan, rates: Rates) -> Iterator[tuple[str, Callable[[], Row]]]:
    """In order of value. The later ones repeat earlier ones, which are run once."""
    models = RandomModels(plan)
    first, *others = plan.models
    big = others[0] if others else first
    high_k, few, many = max(plan.drafts), plan.rows[0], plan.rows[-1]

    def attention(model: str, rows: int, k: int) -> Iterator[tuple[str, Callable[[], Row]]]:
        for name in backends(plan, model):
            yield (
                f"attention {name} {model} {rows} x {1 + k}",
                partial(check_attention, plan, model, name, rows, 1 + k),
            )

    def step(model: str, rows: int, k: int, **config: Any) -> tuple[str, Callable[[], Row]]:
        kind = " compiled" if config.get("compile") else ""
        run = partial(check_step, models, plan, model, k, rows, rates, **config)
        return f"step {model} rows {rows} k {k}{kind}", run

    for model in dict.fromkeys((first, big)):
        for rows in (few, plan.rows[1]):
            yield from attention(model, rows, high_k)
    for name in backends(plan, first):
        yield f"graph = eager {name} {first}", partial(check_graph, models, plan, first, name, high_k, plan.rows[1])
    for drafter in ({"drafter": "ngram"}, {"drafter": "forced", "forced_num_accepted": high_k // 2}):
        depth = partial(check_depth, models, plan, first, drafter, high_k, plan.rows[1])
        yield f"depth 1 = depth 0 {drafter['drafter']} {first}", depth
    for k in plan.drafts:
        yield step(first, few, k)
    for rows, k in ((few, 0), (few, plan.drafts[1]), (plan.rows[1], plan.drafts[1]), (many, plan.drafts[1])):
        yield step(big, rows, k)
    if plan.device.type == "cuda" or plan.compile:
        yield step(big, few, 0, compile=True)
        yield step(big, few, plan.drafts[1], compile=True)
    for model in (big, *others, first):  # the whole matrix
        for rows in plan.rows:
            for k in plan.drafts:
                yield from attention(model, rows, k)
                yield step(model, rows, k)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=270.0, help="start no check after this many seconds")
    parser.add_argument("--out", type=Path, default=Path("out/gpu_check"))
    parser.add_argument("--compile", action="store_true", help="compile every step, not only the lines that say so")
    parser.add_argument("--tiny", action="store_true", help="small shapes on the CPU")
    args = parser.parse_args(argv)
    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit("gpu_check needs a CUDA device; --tiny runs the same checks in small on the CPU")
    if args.tiny:
        plan = Plan(torch.device("cpu"), torch.float32, ("tiny",), (1, 3), (0, 2), 96, 3, args.compile)
    else:
        models = ("SmolLM2-135M", "Llama-3.1-8B", "Qwen3-8B")
        plan = Plan(torch.device("cuda"), torch.bfloat16, models, (1, 8, 32, 64), (0, 3, 5), 4096, 20, args.compile)
    report = Report(args.out, args.budget_s, plan.device.type, plan.dtype)
    with torch.no_grad():
        rates = measured_rates(plan.device.type, plan.dtype)
        report.run("machine", lambda: machine(rates))
        done: set[str] = set()
        for name, check in checks(plan, rates):
            if name not in done:
                done.add(name)
                report.run(name, check)
    report.close()
    table = choice_table(plan, report.rows)
    (args.out / "attention_table.json").write_text(json.dumps(table, indent=1), encoding="utf-8")
    counts = f"{len(report.rows)} checks, {len(report.failed)} failed, {len(report.skipped)} not reached"
    print(f"{counts}; {args.out}/table.md")
    return int(bool(report.failed))


if __name__ == "__main__":
    raise SystemExit(main())
