"""List what a graph consists of: ops by module, kind and source line, memory, the Python values it baked.

    graphspec graphs inspect --rows 4
    graphspec graphs inspect --device cuda --dot graph.dot

The ops are those of a record; on CUDA one is made beside the graph, which knows only kernels (`--dot` shows them).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from graphs import GraphKey, RecordedProgram, record
from graphs.debug import GraphSummary, summarise, write_dot
from graphspec.commands.command import Command
from graphspec.commands.graphs.running_engine import add_engine_options, key_of, running_engine
from graphspec.engine.engine import Engine
from graphspec.engine.resolve import resolve_device


def summary_of(engine: Engine, key: GraphKey, top: int) -> GraphSummary:
    """Capture the graph and summarise it."""
    step = engine._runner.decode_step

    def work() -> GraphSummary:
        graph = step.capture(key)
        recorded = isinstance(graph.program, RecordedProgram)
        return summarise(graph, None if recorded else record(lambda: step.step(key))[0], top)

    return engine._runner.on_stream(work)


def draw(engine: Engine, key: GraphKey, path: Path) -> None:
    """Write the nodes of the CUDA graph."""
    step = engine._runner.decode_step

    def work() -> None:
        step.fill_with_padding()
        write_dot(path, lambda: step.step(key), engine._runner.device)

    engine._runner.on_stream(work)


def run_command(args: argparse.Namespace) -> int:
    if args.dot and resolve_device(args.device).type != "cuda":
        raise ValueError("--dot shows the nodes of a CUDA graph: it needs --device cuda")
    key = key_of(args)
    with running_engine(args) as engine:
        found = summary_of(engine, key, args.top)
        if args.dot:
            draw(engine, key, args.dot)
    if args.json:
        print(json.dumps({**dataclasses.asdict(found), "key": key._asdict()}))
    else:
        print(f"{'key':<18}{key._asdict()}")
        print("\n".join(found.lines_of_text()))
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `graphspec graphs inspect` takes."""
    parser.add_argument("--top", type=int, default=20, help="lines per table")
    parser.add_argument("--dot", type=Path, help="on CUDA: also write the graph's nodes as Graphviz DOT")
    add_engine_options(parser)


COMMAND = Command(__doc__, add_arguments, run_command)
