"""The `graphspec` command: finds the subcommand and turns errors into one sentence."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import transformers

from graphs import StreamError
from graphspec.commands import generate


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        status: int = args.run(args)
        return status
    except (ValueError, RuntimeError, FileNotFoundError, StreamError) as error:
        print(f"graphspec: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="graphspec", description="LLM inference with static 1 + k decode steps.")
    commands = found.add_subparsers(dest="command", required=True)
    defaults = argparse.ArgumentDefaultsHelpFormatter
    answer = commands.add_parser("generate", help="answer prompts", formatter_class=defaults)
    generate.add_arguments(answer)
    answer.set_defaults(run=generate.run_command)
    return found


if __name__ == "__main__":
    sys.exit(main())
