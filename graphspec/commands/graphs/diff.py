"""Compare a replay with eager on a running batch, op by op, up to the first difference.

    graphspec graphs diff --sampler plain

The exit status is 1 if there is one.
"""

from __future__ import annotations

import argparse
import json

from graphs import Difference, compare_replay
from graphspec.commands.command import Command
from graphspec.commands.graphs.running_engine import add_engine_options, key_of, running_engine, stage_running_rows


def difference(args: argparse.Namespace) -> Difference | None:
    key = key_of(args)
    with running_engine(args) as engine:

        def work() -> Difference | None:
            graph = engine._runner.decode_step.capture(key)
            stage_running_rows(engine, key)
            return compare_replay(graph)

        return engine._runner.on_stream(work)


def run_command(args: argparse.Namespace) -> int:
    found = difference(args)
    if args.json:
        print(json.dumps({"key": key_of(args)._asdict(), "difference": None if found is None else str(found)}))
    else:
        print(found or "replay and eager agree in every bit")
    return int(found is not None)


COMMAND = Command(__doc__, add_engine_options, run_command)
