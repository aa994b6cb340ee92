"""What one replay costs the host before its kernels, per bucket: `graphspec bench step --overhead`."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from graphspec.commands.bench.options import load, on_same_weights
from graphspec.commands.bench.output import Output
from graphspec.engine.engine import Engine
from graphspec.records.config import EngineConfig
from graphspec.records.launch import DecodeRows

COLUMNS = {
    "rows": "rows", "num_draft": "k", "staging_us": "staging us", "copy_us": "copy us",
    "lookup_and_launch_us": "lookup + launch us", "total_us": "total us",
}  # fmt: skip


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
    module = load(args)
    output = Output("bench_step --overhead", args, next(module.parameters()).dtype, COLUMNS)
    output.heading()
    for k in args.num_draft:
        config = EngineConfig(
            num_speculative_tokens=k, max_num_seqs=args.max_num_seqs, max_model_len=2048, capture="lazy"
        )
        with torch.no_grad(), Engine(on_same_weights(module), config=config) as engine:
            for rows in engine._runner.graph_plan.ladder.rungs:
                output.line({"rows": rows, "num_draft": k}, overhead(engine, rows))
