"""`graphspec graphs` as a script, which takes the options of all its subcommands with each of them.

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
import sys
from collections.abc import Sequence

from graphspec.commands.command import Command, run_script
from graphspec.commands.main import GRAPHS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("command", choices=GRAPHS)
    for command in GRAPHS.values():
        command.add_arguments(parser)


def run_command(args: argparse.Namespace) -> int:
    return GRAPHS[args.command].run(args)


def main(argv: Sequence[str] | None = None) -> int:
    command = Command(__doc__, add_arguments, run_command)
    return run_script("graph_debug", command, argv, conflict_handler="resolve")  # subcommands share options


if __name__ == "__main__":
    sys.exit(main())
