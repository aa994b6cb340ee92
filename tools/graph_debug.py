"""Look at captured graphs.

plan     which batch size uses which graph, and what padding costs, before anything is served
guard    what would not survive capture in a function of yours (`--function module:name`) or in the engine's step
inspect  what a graph of the engine consists of: ops by module, kind and source line, memory, the values it baked
diff     replay against eager on a running batch, op by op: the first difference
poison   replay with garbage in everything that padding rows own: what changes that must not
coverage serve the repository's prompts and show, step by step, which graph replayed or why none did

python tools/graph_debug.py plan --max-num-seqs 16 --num-speculative-tokens 3 --attention 32 8 128
python tools/graph_debug.py guard --function my_module:step
python tools/graph_debug.py inspect --rows 4
python tools/graph_debug.py coverage --max-num-seqs 8 --html report.html   (with plan and guard, for a browser)
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from bench_common import params_for, quiet_transformers
from graph_report import page
from torch.utils._pytree import tree_leaves

from attention import AttentionShape, AttentionSpec, ChoiceTable, Machine, read_lines
from graphs import (
    CaptureGuard,
    GraphKey,
    GraphPlan,
    PersistentBuffers,
    RecordedProgram,
    compare_replay,
    poison,
    record,
)
from graphs.cuda import CudaCapture
from graphspec import Engine, EngineConfig, SamplingParams
from graphspec.commands.prompt_files import BUILTIN_PROMPTS, read_prompts
from graphspec.execution.iteration import DecodeInputs
from graphspec.execution.runner import decode_buckets, graph_plan
from graphspec.models.builtin import NAME
from graphspec.records.config import halving_tiers
from graphspec.sampling.keyed_sampling import SAMPLERS


def plan(args: argparse.Namespace) -> dict[str, Any]:
    """Every batch size with its graph and its padding rows."""
    k = args.num_speculative_tokens
    rows = None if args.graph_rows is None else tuple(args.graph_rows)
    user = EngineConfig(max_num_seqs=args.max_num_seqs, num_speculative_tokens=k, graph_rows=rows)
    tiers = halving_tiers(k) if args.adaptive_speculation else (k,)
    resolved = graph_plan(user, tiers, drafts_ahead=True)
    pad = resolved.ladder.pad
    sizes = [
        {"batch": n, "rows": pad(n), "positions": pad(n) * (1 + k), "padding": 1 - n / pad(n)}
        for n in range(1, args.max_num_seqs + 1)
    ]
    keys = [key._asdict() for key in resolved.all_keys()]
    found = {"keys": keys, "samplers": list(resolved.samplers), "num_drafts": list(tiers), "sizes": sizes}
    return found | ({"attention": attention_plan(args, resolved)} if args.attention else {})


def attention_plan(args: argparse.Namespace, resolved: GraphPlan) -> str:
    """Which FlashInfer backend serves which bucket, and why: on this GPU, or without one on an H100 or H200."""
    present = torch.cuda.is_available()
    machine = Machine.of(torch.device("cuda")) if present else Machine(capability=(9, 0), num_sms=132)
    heads, kv_heads, head_dim = args.attention
    spec = AttentionSpec(head_dim**-0.5)
    page_size, longest = 16, 8192
    shape = AttentionShape(
        heads, kv_heads, head_dim, page_size, longest // page_size, torch.bfloat16, torch.device("cuda"), (spec,)
    )
    return ChoiceTable(shape, machine, read_lines(args.attention_table)).describe(decode_buckets(resolved))


def show_plan(result: dict[str, Any]) -> None:
    rows, drafts, samplers = len({key["rows"] for key in result["keys"]}), result["num_drafts"], result["samplers"]
    print(f"{len(result['keys'])} graphs: {rows} row counts x {len(drafts)} k x {len(samplers)} samplers")
    print(f"k: {', '.join(map(str, drafts))}\nsamplers: {', '.join(samplers)}\n")
    print(f"{'batch':>6} {'graph rows':>11} {'positions':>10} {'padding':>8}")
    for size in result["sizes"]:
        bar = "#" * round(20 * size["padding"])
        print(f"{size['batch']:>6} {size['rows']:>11} {size['positions']:>10} {100 * size['padding']:>6.0f} % {bar}")
    if "attention" in result:
        print(f"\n{result['attention']}")


def guard(args: argparse.Namespace) -> dict[str, Any]:
    """Findings for a user's function, which takes no arguments, or for the engine's own step."""
    if args.function:
        module, _, name = args.function.partition(":")
        sys.path.insert(0, "")
        loaded = importlib.import_module(module)
        buffers: PersistentBuffers = getattr(loaded, "BUFFERS", PersistentBuffers())
        constants = [t for t in tree_leaves(list(vars(loaded).values())) if isinstance(t, torch.nn.Parameter)]
        findings = CaptureGuard(buffers, constants).inspect(getattr(loaded, name))
    else:
        with running_engine(args) as engine:
            runner = engine._runner
            step, key = runner.decode_step, key_of(args)
            watch = CaptureGuard(step.buffers, runner.constants())
            engine._runner.on_stream(step.fill_with_padding)
            findings = engine._runner.on_stream(lambda: watch.inspect(lambda: step.step(key)))
    return {"findings": [{**dataclasses.asdict(f), "remedy": f.remedy} for f in findings]}


def show_guard(result: dict[str, Any]) -> None:
    for f in result["findings"]:
        print(f"{f['line']}\n    {f['kind']}: {f['what']}: {f['why']}\n    -> {f['remedy']}")
    print(f"{len(result['findings'])} findings")


def inspect(args: argparse.Namespace) -> dict[str, Any]:
    """Ops of one graph by module, kind and source line, its memory, and the values it baked.

    The ops are those of a record; on CUDA one is made beside the graph, which knows only kernels (`--dot` shows them).
    """
    with running_engine(args) as engine:
        step, key = engine._runner.decode_step, key_of(args)
        graph = engine._runner.on_stream(lambda: step.capture(key))
        program = graph.program
        if not isinstance(program, RecordedProgram):
            program, _ = engine._runner.on_stream(lambda: record(lambda: step.step(key)))
        if args.dot:
            write_dot(engine, key, args.dot)
        baked = Counter(f"{value.op}  {value.value!r}  {value.line}" for value in program.baked)
        return {
            "key": key._asdict(),
            "num_ops": program.num_ops,
            "capture_seconds": graph.capture_seconds,
            "pool_bytes": graph.program.pool_bytes,
            "buffer_bytes": step.buffers.num_bytes,
            "outside_tensors": len(program.outside),
            "num_baked": len(program.baked),
            "modules": Counter(re.sub(r"\.\d+", ".*", node.module) or "(step)" for node in program.nodes).most_common(
                args.top
            ),
            "ops": Counter(str(node.op) for node in program.nodes).most_common(args.top),
            "lines": Counter(node.line for node in program.nodes).most_common(args.top),
            "baked": baked.most_common(args.top),
        }


def write_dot(engine: Engine, key: GraphKey, path: Path) -> None:
    """Capture the step once more with CUDA's debug mode and write the nodes of that graph."""
    device = engine._runner.device
    if device.type != "cuda":
        raise SystemExit("--dot shows the nodes of a CUDA graph: it needs --device cuda")
    step = engine._runner.decode_step

    def work() -> None:
        step.fill_with_padding()
        program, _ = CudaCapture(device, debug=True)(lambda: step.step(key))
        program.dump_dot(str(path))

    engine._runner.on_stream(work)


def show_inspect(result: dict[str, Any]) -> None:
    for name in ("key", "num_ops", "capture_seconds", "pool_bytes", "buffer_bytes", "outside_tensors", "num_baked"):
        print(f"{name:<18}{result[name]}")
    for title in ("modules", "ops", "lines", "baked"):
        print(f"\n{title}")
        for what, count in result[title]:
            print(f"{count:>6}  {what}")


def diff(args: argparse.Namespace) -> dict[str, Any]:
    with running_engine(args) as engine:
        key = key_of(args)

        def work() -> str | None:
            graph = engine._runner.decode_step.capture(key)
            stage_running_rows(engine, key)
            found = compare_replay(graph)
            return None if found is None else str(found)

        return {"key": key._asdict(), "difference": engine._runner.on_stream(work)}


def show_diff(result: dict[str, Any]) -> None:
    print(result["difference"] or "replay and eager agree in every bit")


def poisoned(args: argparse.Namespace) -> dict[str, Any]:
    with running_engine(args) as engine:
        step, key = engine._runner.decode_step, key_of(args)

        def work() -> list[str]:
            graph = step.capture(key)
            real = stage_running_rows(engine, key)
            return poison(graph, step.padding(), lambda out: [o[:real] for o in out])

        return {"key": key._asdict(), "violations": engine._runner.on_stream(work)}


def show_poisoned(result: dict[str, Any]) -> None:
    print("\n".join(result["violations"]) or "garbage in padding changes no real row")


def coverage(args: argparse.Namespace) -> dict[str, Any]:
    """Keys and reasons of every decode step of a real load, and what each graph cost."""
    quiet_transformers()
    k = args.num_speculative_tokens
    config = EngineConfig(num_speculative_tokens=k, max_num_seqs=args.max_num_seqs, enforce_eager=args.enforce_eager)
    prompts = read_prompts(BUILTIN_PROMPTS)
    with Engine.from_pretrained(args.model, config) as engine:
        done = engine.generate(prompts, SamplingParams(max_tokens=args.max_tokens))
        store = engine._runner.decode_step.store
        timeline = [{"key": key, "off_graph": reason} for key, reason in store.timeline]
        graphs = [dataclasses.asdict(line) for line in store.ledger()]
        never = store.never_replayed()
    requests = [{"id": c.request_id, "steps": c.num_decode_steps, "off_graph": c.num_off_graph_steps} for c in done]
    return {
        "steps": len(timeline),
        "timeline": timeline,
        "graphs": graphs,
        "never_replayed": never,
        "requests": requests,
    }


def show_coverage(result: dict[str, Any]) -> None:
    on = sum(not step["off_graph"] for step in result["timeline"])
    print(f"{on} of {result['steps']} decode steps replayed a graph\n")
    start = 0
    for (key, reason), group in groupby(result["timeline"], lambda s: (s["key"], s["off_graph"])):
        count = len(list(group))
        what = f"off graph: {reason}" if reason else "replay"
        which = f"{key.rows:>4} rows, k = {key.num_draft}, {key.sampler:<27}"
        print(f"steps {start:>5}..{start + count - 1:<5} {which} {what}")
        start += count
    print(f"\n{'rows':>5} {'k':>3} {'sampler':>27} {'replays':>8} {'capture s':>10} {'ms/replay':>10} {'ops':>6}")
    for g in result["graphs"]:
        each, key = 1e3 * g["launch_seconds"] / max(1, g["num_replays"]), g["key"]
        print(f"{key.rows:>5} {key.num_draft:>3} {key.sampler:>27} {g['num_replays']:>8} {g['capture_seconds']:>10.2f} "
              f"{each:>10.2f} {g['num_ops'] or '':>6}")  # fmt: skip
    off = [r["id"] for r in result["requests"] if r["off_graph"]]
    print(f"\n{len(result['requests']) - len(off)} of {len(result['requests'])} requests never left their graphs")
    if result["graphs"]:
        pools, static = sum(g["pool_bytes"] for g in result["graphs"]), result["graphs"][0]["static_bytes"]
        print(f"memory: {static / 2**20:.1f} MiB of buffers shared by all graphs, {pools / 2**20:.1f} MiB of their own")
    if result["never_replayed"]:
        print(f"captured and never replayed: {result['never_replayed']}")


def running_engine(args: argparse.Namespace) -> Engine:
    """An engine with rows - 1 requests in the middle of their text, so that the graph has a padding row."""
    quiet_transformers()
    config = EngineConfig(
        num_speculative_tokens=args.num_speculative_tokens,
        max_num_seqs=args.rows,
        depth=0,
        max_model_len=256,
        num_pages=16 * args.rows,
        device=args.device,
        enforce_eager=True,
    )
    engine = Engine.from_pretrained(args.model, config)
    for i in range(max(1, args.rows - 1)):
        params = params_for(args.sampler, max_tokens=100, ignore_eos=True, seed=i)
        engine.add_request([10 + i, 20, 30, 40, 20, 30, 40], params)
    for _ in range(6):
        engine.step()
    return engine


def key_of(args: argparse.Namespace) -> GraphKey:
    k = args.num_speculative_tokens
    return GraphKey("decode", args.rows, k, k, args.sampler)


def stage_running_rows(engine: Engine, key: GraphKey) -> int:
    """Put the running requests into the static inputs, as a launch would; returns how many."""
    step, table = engine._runner.decode_step, engine._scheduler.table
    slots = [slot for slot, request in enumerate(table.request) if request is not None][: key.rows]
    step.fill_with_padding()
    step.stage(DecodeInputs(torch.tensor(slots), torch.from_numpy(table.page_table[slots])))
    return len(slots)


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], dict[str, Any]], Callable[[dict[str, Any]], None]]] = {
    "plan": (plan, show_plan),
    "guard": (guard, show_guard),
    "inspect": (inspect, show_inspect),
    "diff": (diff, show_diff),
    "poison": (poisoned, show_poisoned),
    "coverage": (coverage, show_coverage),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--model", default=NAME)
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, default=16, help="plan, coverage: the largest batch")
    parser.add_argument(
        "--adaptive-speculation", action="store_true", help="plan: every k that may be chosen, up to the most"
    )
    parser.add_argument(
        "--graph-rows", type=int, nargs="+", help="plan: row counts of your own in place of the default"
    )
    parser.add_argument("--attention", type=int, nargs=3, metavar=("HEADS", "KV_HEADS", "HEAD_DIM"),
                        help="plan: also the FlashInfer backend of every bucket, for bfloat16 heads")  # fmt: skip
    parser.add_argument("--attention-table", help="plan: measurements that overrule the choice of backends")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dot", type=Path, help="inspect, on CUDA: also write the graph's nodes as Graphviz DOT")
    parser.add_argument("--max-tokens", type=int, default=32, help="coverage: tokens per answer")
    parser.add_argument("--enforce-eager", action="store_true", help="coverage: without graphs, for comparison")
    parser.add_argument("--rows", type=int, default=2, help="rows of the graph to look at")
    parser.add_argument("--sampler", choices=SAMPLERS, default="greedy")
    parser.add_argument("--function", help="guard: module:name of a function without arguments; the buffers it may use "
                        "are a PersistentBuffers called BUFFERS in that module")  # fmt: skip
    parser.add_argument("--top", type=int, default=20, help="inspect: lines per table")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--html", type=Path, help="coverage: also write a page with plan, timeline, costs and findings")
    args = parser.parse_args(argv)
    compute, show = COMMANDS[args.command]
    result = compute(args)
    if args.html and args.command == "coverage":
        findings = guard(args)["findings"]
        args.html.write_text(page(f"Graphs of {args.model}", plan(args), result, findings), encoding="utf-8")
    if args.json:
        print(json.dumps(result))
    else:
        show(result)
    return int(bool(result.get("findings") or result.get("difference") or result.get("violations")))


if __name__ == "__main__":
    sys.exit(main())
