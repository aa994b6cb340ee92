"""Name what would not survive capture in a function of yours, or in the engine's step, with line and remedy.

    graphspec graphs guard --function my_module:step
    graphspec graphs guard --rows 4 --sampler plain

A function takes no arguments, and is run twice. It may use the parameters among its module's globals and the tensors of
a `graphs.PersistentBuffers` that is called BUFFERS there. The exit status is 1 if something was found.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from graphs import CaptureGuard, Finding
from graphs.debug import guard_function
from graphspec.commands.command import Command
from graphspec.commands.graphs.running_engine import add_engine_options, key_of, running_engine


def guard_step(args: argparse.Namespace) -> list[Finding]:
    """Findings for the engine's step."""
    with running_engine(args) as engine:
        runner, key = engine._runner, key_of(args)
        step, watch = runner.decode_step, CaptureGuard(runner.decode_step.buffers, runner.constants())
        runner.on_stream(step.fill_with_padding)
        return runner.on_stream(lambda: watch.inspect(lambda: step.step(key)))


def run_command(args: argparse.Namespace) -> int:
    if args.function:
        sys.path.insert(0, "")  # modules beside which the command is called
        findings = guard_function(args.function)
    else:
        findings = guard_step(args)
    if args.json:
        print(json.dumps({"findings": [{**dataclasses.asdict(f), "remedy": f.remedy} for f in findings]}))
    else:
        for f in findings:
            print(f"{f.line}\n    {f.kind}: {f.what}: {f.why}\n    -> {f.remedy}")
        print(f"{len(findings)} findings")
    return int(bool(findings))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `graphspec graphs guard` takes."""
    parser.add_argument("--function", metavar="MODULE:NAME", help="guard this function in place of the engine's step")
    add_engine_options(parser)


COMMAND = Command(__doc__, add_arguments, run_command)
