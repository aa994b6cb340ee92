"""The `graphspec` command: finds the subcommand and turns errors into one sentence."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from graphs import StreamError
from graphspec.commands import bench, generate, graphs
from graphspec.commands.bench import attention, scheduler, startup, step
from graphspec.commands.bench import generate as bench_generate
from graphspec.commands.command import Command, quiet_transformers
from graphspec.commands.graphs import coverage, diff, guard, inspect, plan, poison
from graphspec.commands.provenance import versions

GRAPHS: Mapping[str, Command] = {
    "plan": plan.COMMAND,
    "guard": guard.COMMAND,
    "inspect": inspect.COMMAND,
    "diff": diff.COMMAND,
    "poison": poison.COMMAND,
    "coverage": coverage.COMMAND,
}
BENCH: Mapping[str, Command] = {
    "step": step.COMMAND,
    "generate": bench_generate.COMMAND,
    "startup": startup.COMMAND,
    "attention": attention.COMMAND,
    "scheduler": scheduler.COMMAND,
}


class ShowVersions(argparse.Action):
    """Prints what somebody who reports a problem should name."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        for name, version in versions().items():
            print(f"{name:<14}{version}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    command: Command = vars(args).pop("command")
    quiet_transformers()
    try:
        return command.run(args)
    except (ValueError, RuntimeError, FileNotFoundError, StreamError) as error:
        print(f"graphspec: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="graphspec", description="LLM inference with static 1 + k decode steps.")
    found.add_argument(
        "--version",
        action=ShowVersions,
        nargs=0,
        dest=argparse.SUPPRESS,
        default=argparse.SUPPRESS,
        help="versions and the device, then exit",
    )
    top = found.add_subparsers(required=True, metavar="COMMAND")
    _add(top, {"generate": generate.COMMAND})
    for name, package, commands in (("graphs", graphs, GRAPHS), ("bench", bench, BENCH)):
        summary = (package.__doc__ or "").partition("\n")[0]
        group = top.add_parser(name, help=summary, description=summary)
        _add(group.add_subparsers(required=True, metavar="COMMAND"), commands)
    return found


def _add(subparsers: Any, commands: Mapping[str, Command]) -> None:
    for name, command in commands.items():
        one = subparsers.add_parser(name, help=command.summary)
        command.declare(one)
        one.set_defaults(command=command)


if __name__ == "__main__":
    sys.exit(main())
