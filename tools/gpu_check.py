"""One command that says whether graphspec works on a GPU, and how fast.

    python tools/gpu_check.py --budget-s 270 --out out/gpu_check
    PYTHONPATH=out/kernels python tools/gpu_check.py        # with FlashInfer modules built by tools/build_kernels.py

Needs nothing from the network: the models have random weights in the shapes of SmolLM2-135M, Llama-3.1-8B and Qwen3-8B.
Checks come in order of value, each line is written to `rows.jsonl` as it is measured, and what the budget leaves out is
named at the end. They run in a process of their own: one that crashes, or is silent for `--patience-s`, is ended, that
check has failed, and another process goes on with the next. Exit code 1 if a check failed. `--tiny` runs everything on
the CPU in small, to test this script.

    attention   every backend against the float32 reference, lengths and inputs changed within one captured graph
    graph       decode steps on graphs against `enforce_eager`: equal tokens
    depth       scheduler one step ahead against synchronous, forced and n-gram drafts: equal tokens
    step        time of a decode step, gap before its launch, ratio to the bound of speed_of_light.py
    lengths     attention against length, as bench_attention.py shows it
    parts       a step taken apart inside its graph, as bench_step.py shows it
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lib.gpu_engines import RandomModels, check_depth, check_graph, check_parts, check_step
from lib.gpu_plan import MODELS, Plan
from lib.gpu_report import Report, Row, summary, tables
from lib.supervised import LOST, supervise

from attention import AttentionShape, AttentionSpec, Machine, create_backend
from attention.flashinfer.guards import NAMES, missing, unsupported
from graphspec.commands.bench import attention
from graphspec.commands.bench.attention_step import AttentionStep
from graphspec.commands.bench.speed_of_light import measured_rates, seconds_of
from graphspec.commands.provenance import provenance

# Largest error of a bfloat16 attention output, as a share of the largest value: four units in the last place.
MAX_ERROR = 2.0**-6
LENGTH_SETS = 6  # replays of one graph with new lengths and new inputs
OVERTIME_S = 20.0  # in which the check that runs when the budget is spent may end

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


def machine(plan: Plan) -> Row:
    rates = measured_rates(plan.device.type, plan.dtype)
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
        "ok": bool(worst <= MAX_ERROR), "worst_error": worst, "us": 1e6 * seconds, "gb_per_s": kv_bytes / seconds / 1e9,
        "bucket": {"model": model, "backend": name, "rows": rows, "query_len": query_len},
    }  # fmt: skip


def check_lengths(plan: Plan, model: str, rows: int, query_len: int) -> Row:
    """Every backend at lengths up to the longest, in turns on one graph each."""
    shape, rates = attention_shape(plan, model), measured_rates(plan.device.type, plan.dtype)
    names = backends(plan, model)
    lengths = [max(query_len, plan.max_model_len // part) for part in (32, 8, 2, 1)]
    options = argparse.Namespace(backends=names, lengths=lengths, repeats=plan.steps)
    taken = attention.measure(options, shape, rows, query_len)
    lines = [
        {"backend": name, "rows": rows, "num_draft": query_len - 1, "length": length}
        | attention.line_of(shape, rates, rows, query_len, length, times, taken[names[0], length])
        for (name, length), times in taken.items()
    ]
    return {"ok": True, "lengths": lines}


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
    """The backends to check; the reference alone if asking for them fails, which is a failed check of its own."""
    try:
        return usable(plan, model)
    except Exception:
        return ["reference"]


def check_backends(plan: Plan, model: str) -> Row:
    return {"ok": True, "backends": " ".join(usable(plan, model))}


def usable(plan: Plan, model: str) -> list[str]:
    """The reference, and each backend that is faster and can serve a model here."""
    if plan.device.type != "cuda":
        return ["cpu", "reference"]
    if missing() is not None:
        return ["reference"]
    shape, machine = attention_shape(plan, model), Machine.of(plan.device)
    return [*(name for name in NAMES if unsupported(name, shape, machine) is None), "reference"]


# The order of checks.

Check = tuple[str, Callable[[], Row]]


def checks(plan: Plan) -> Iterator[Check]:
    """In order of value. The later ones repeat earlier ones, which are run once."""
    models = RandomModels(plan)
    first, *others = plan.models
    big = others[0] if others else first
    high_k, few, some, many = max(plan.drafts), plan.rows[0], plan.rows[1], plan.rows[-1]
    one_k = plan.drafts[1]

    def attention_checks(model: str, rows: int, k: int) -> Iterator[Check]:
        for name in backends(plan, model):
            run = partial(check_attention, plan, model, name, rows, 1 + k)
            yield f"attention {name} {model} {rows} x {1 + k}", run

    def step(model: str, rows: int, k: int, kind: str = "step", **config: Any) -> Check:
        check = check_step if kind == "step" else check_parts
        name = f"{kind} {model} rows {rows} k {k}{' compiled' if config.get('compile') else ''}"
        return name, partial(check, models, plan, model, k, rows, **config)

    yield "machine", partial(machine, plan)
    for model in plan.models:
        yield f"backends {model}", partial(check_backends, plan, model)
    for model in dict.fromkeys((first, big)):
        for rows in (few, some):
            yield from attention_checks(model, rows, high_k)
    for name in backends(plan, first):
        yield f"graph = eager {name} {first}", partial(check_graph, models, plan, first, name, high_k, some)
    for drafter in ({"drafter": "ngram"}, {"drafter": "forced", "forced_num_accepted": high_k // 2}):
        depth = partial(check_depth, models, plan, first, drafter, high_k, some)
        yield f"depth 1 = depth 0 {drafter['drafter']} {first}", depth
    for k in plan.drafts:
        yield step(first, few, k)
    yield step(first, few, one_k, "parts")
    yield f"lengths {big} {some} x {1 + one_k}", partial(check_lengths, plan, big, some, 1 + one_k)
    for rows, k in ((few, 0), (few, one_k), (some, one_k), (many, one_k)):
        yield step(big, rows, k)
    yield step(big, some, one_k, "parts")
    if plan.device.type == "cuda" or plan.compile:
        for k in (0, one_k):
            yield step(big, few, k, compile=True)
        yield step(big, few, one_k, "parts", compile=True)
    for model in (big, *others, first):  # the whole matrix
        for rows in plan.rows:
            for k in plan.drafts:
                yield from attention_checks(model, rows, k)
                yield step(model, rows, k)


def plan_of(args: argparse.Namespace) -> Plan:
    if args.tiny:
        return Plan(torch.device("cpu"), torch.float32, ("tiny",), (1, 3), (0, 2), 96, 3, args.compile)
    models = ("SmolLM2-135M", "Llama-3.1-8B", "Qwen3-8B")
    return Plan(torch.device("cuda"), torch.bfloat16, models, (1, 8, 32, 64), (0, 3, 5), 4096, 20, args.compile)


def work(args: argparse.Namespace) -> int:
    """The process that checks: everything that has no line yet, while there is time."""
    plan = plan_of(args)
    report = Report(args.out, provenance(plan.device.type, plan.dtype))
    done = {row["check"] for row in report.rows()}
    with (args.out / "stack.txt").open("w") as stack, torch.no_grad():
        faulthandler.enable(stack)
        for name, check in checks(plan):
            if name in done:
                continue
            done.add(name)
            if time.monotonic() > args.until:
                report.add(name, {"ok": None})
            elif report.run(name, check)["ok"] is False and not device_answers(plan.device):
                return LOST
            gc.collect()  # engines hold memory in cycles
            if plan.device.type == "cuda":
                torch.cuda.empty_cache()
    return 0


def device_answers(device: torch.device) -> bool:
    """False once a kernel has gone wrong: every later call of this process then reports its error."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=270.0, help="start no check after this many seconds")
    parser.add_argument("--patience-s", type=float, default=100.0, help="a check that takes longer has failed")
    parser.add_argument("--out", type=Path, default=Path("out/gpu_check"))
    parser.add_argument("--compile", action="store_true", help="compile every step, not only the lines that say so")
    parser.add_argument("--tiny", action="store_true", help="small shapes on the CPU")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # this is the worker; when it may start no more
    args = parser.parse_args(argv)
    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit("gpu_check needs a CUDA device; --tiny runs the same checks in small on the CPU")
    if args.until is not None:
        return work(args)
    until = time.monotonic() + args.budget_s
    report = Report(args.out, {})
    report.clear()
    options = sys.argv[1:] if argv is None else argv
    command = [sys.executable, str(Path(__file__)), *options, "--until", str(until)]
    with suppress(KeyboardInterrupt):
        supervise(command, report, until + OVERTIME_S, args.patience_s)
    return conclude(report, plan_of(args))


def conclude(report: Report, plan: Plan) -> int:
    """Write and print the tables."""
    rows = report.rows()
    text = tables(rows)
    facts = ", ".join(str(rows[0].get(name, "")) for name in ("commit", "device", "dtype", "torch")) if rows else ""
    (report.out / "table.md").write_text(f"{facts}\n\n{summary(rows)}\n\n```\n{text}\n```\n", encoding="utf-8")
    table = json.dumps(choice_table(plan, rows), indent=1)
    (report.out / "attention_table.json").write_text(table, encoding="utf-8")
    missed = sum(row["ok"] is None for row in rows)
    print(f"\n{facts}\n\n{text}\n")
    print(f"{len(rows) - missed} checks, {len(report.failed)} failed, {missed} not reached; {report.out}/table.md")
    return int(bool(report.failed))


if __name__ == "__main__":
    raise SystemExit(main())
