"""Device and host time of one decode step, per rows, k, sampler and depth, variants interleaved in one process.

    python tools/bench_step.py --rows 1 8 --num-draft 0 5 --samplers greedy plain bounded sorted
    python tools/bench_step.py --overhead --max-num-seqs 64

Times are medians over steps that hold decode rows only. `vs first` compares with the first sampler at the same rows and
k; since variants take turns, drift of the machine meets all of them alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from bench_common import params_for, provenance, step_until_all_decode

from graphspec import Engine, EngineConfig
from graphspec.builtin_model import NAME
from graphspec.sampling import BASES, SAMPLERS
from graphspec.step import DecodeRows


def measure(engine: Engine, rows: int, sampler: str, context: int, steps: int) -> tuple[list[float], list[float]]:
    """Device and host seconds of `steps` steps of `rows` requests that all decode."""
    k = engine.config.num_draft
    params = params_for(sampler, max_tokens=(steps + 4) * (1 + k), ignore_eos=True, seed=1)
    ids = [engine.add_request([100 + (7 * i + j) % 900 for j in range(context)], params) for i in range(rows)]
    step_until_all_decode(engine)
    engine.step()
    device, host = engine._times.busy, engine._times.host
    device.clear()
    host.clear()
    for _ in range(steps):
        engine.step()
    result = list(device), list(host)
    for request_id in ids:
        engine.abort(request_id)
    while engine.has_unfinished_requests():
        engine.step()
    engine.drain()
    engine.reset_prefix_cache()
    return result


def overhead(engine: Engine, batch: int, repeats: int = 300) -> dict[str, float]:
    """Median host microseconds of one replay of the graph for `batch` rows, without its kernels."""
    runner, k = engine._runner, engine.config.num_draft
    step, key = runner.decode_step, runner.graph_plan.key(batch, k, k, "greedy")
    slots = np.arange(batch)
    table = np.zeros((batch, engine.config.table_width), np.int32)
    rows = DecodeRows(slots, slots, slots, table, k, "greedy")
    found: dict[str, float] = {}

    def median(name: str, work: Callable[[], Any]) -> None:
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
        found[name] = 1e6 * statistics.median(times)

    def measure_all() -> None:
        graph = step.capture(key)
        staged = runner._ring.take()
        median("staging_us", lambda: staged.fill_decode(rows, key.rows))
        inputs = staged.fill_decode(rows, key.rows)
        step.fill_with_padding()
        median("copy_us", lambda: step.stage(inputs))
        step.fill_with_padding()
        if runner.device.type == "cpu":
            output = graph.program.run()
            graph.program.run = lambda: output  # type: ignore[method-assign]
        median("lookup_and_launch_us", lambda: step.store.replay(key))

    runner.on_stream(measure_all)
    return {**found, "total_us": sum(found.values())}


def show_overhead(args: argparse.Namespace) -> None:
    """One line per bucket of the ladder."""
    if not args.json:
        print(f"{'rows':>5} {'k':>3} {'staging us':>11} {'copy us':>8} {'lookup + launch us':>19} {'total us':>9}")
    for k in args.num_draft:
        config = EngineConfig(num_speculative_tokens=k, max_num_seqs=args.max_num_seqs, max_model_len=2048)
        with torch.no_grad(), Engine.from_pretrained(args.model, config) as engine:
            for rows in engine._runner.graph_plan.ladder.rungs:
                found = overhead(engine, rows)
                if args.json:
                    line = {"tool": "bench_step --overhead", **provenance(engine._runner.device.type)}
                    setting = {"rows": rows, "num_draft": k, "max_num_seqs": args.max_num_seqs, "model": args.model}
                    print(json.dumps({**line, "config": setting, **found}), flush=True)
                else:
                    print(f"{rows:>5} {k:>3} {found['staging_us']:>11.1f} {found['copy_us']:>8.1f} "
                          f"{found['lookup_and_launch_us']:>19.1f} {found['total_us']:>9.1f}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=NAME)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-draft", type=int, nargs="+", default=[0, 5])
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=list(BASES))
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--context", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=12, help="steps per turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each variant")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--overhead", action="store_true", help="host cost of a replay per bucket, without kernels")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="with --overhead: the largest bucket")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if args.overhead:
        show_overhead(args)
        return
    if not args.json:
        print(f"{'rows':>5} {'k':>3} {'sampler':>27} {'device ms':>10} {'vs first':>9} {'host us':>8}")
    for k in args.num_draft:
        config = EngineConfig(
            num_speculative_tokens=k, depth=args.depth, max_num_seqs=max(args.rows), max_model_len=2048,
            dtype=args.dtype, enforce_eager=args.enforce_eager, compile=args.compile,
        )  # fmt: skip
        with Engine.from_pretrained(args.model, config) as engine:
            for rows in args.rows:
                times: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
                for sampler in args.samplers:
                    measure(engine, rows, sampler, args.context, 3)  # captures the graph
                for _ in range(args.rounds):
                    for sampler in args.samplers:
                        device, host = measure(engine, rows, sampler, args.context, args.steps)
                        times[sampler][0].extend(device)
                        times[sampler][1].extend(host)
                first = statistics.median(times[args.samplers[0]][0])
                for sampler, (device, host) in times.items():
                    median = statistics.median(device)
                    row = {
                        "device_ms": 1e3 * median,
                        "device_ms_p90": 1e3 * statistics.quantiles(device, n=10)[8],
                        "vs_first": median / first,
                        "host_us": 1e6 * statistics.median(host),
                    }
                    setting = {"rows": rows, "num_draft": k, "sampler": sampler, **vars(args), "model": args.model}
                    if args.json:
                        print(
                            json.dumps({"tool": "bench_step", **provenance("cpu"), "config": setting, **row}),
                            flush=True,
                        )
                    else:
                        print(f"{rows:>5} {k:>3} {sampler:>27} {row['device_ms']:>10.2f} {row['vs_first']:>9.3f} "
                              f"{row['host_us']:>8.0f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
