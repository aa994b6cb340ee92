"""Replay with garbage in everything that padding rows own, and name what changes that must not.

    graphspec graphs poison --rows 4

The exit status is 1 if something does.
"""

from __future__ import annotations

import argparse
import json

from graphs import poison
from graphspec.commands.command import Command
from graphspec.commands.graphs.running_engine import add_engine_options, key_of, running_engine, stage_running_rows


def violations(args: argparse.Namespace) -> list[str]:
    """One sentence for everything that garbage reached."""
    key = key_of(args)
    with running_engine(args) as engine:
        step = engine._runner.decode_step

        def work() -> list[str]:
            graph = step.capture(key)
            real = stage_running_rows(engine, key)
            return poison(graph, step.padding(), lambda out: [o[:real] for o in out])

        return engine._runner.on_stream(work)


def run_command(args: argparse.Namespace) -> int:
    found = violations(args)
    if args.json:
        print(json.dumps({"key": key_of(args)._asdict(), "violations": found}))
    else:
        print("\n".join(found) or "garbage in padding changes no real row")
    return int(bool(found))


COMMAND = Command(__doc__, add_engine_options, run_command)
