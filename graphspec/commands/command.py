"""What a subcommand is, and how one runs on its own, as a script."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import transformers


@dataclass(frozen=True)
class Command:
    """One subcommand. `doc` is its help, the first line of it where subcommands are listed. `run` works, prints and
    returns the exit status; it raises ValueError, in one sentence, for what a user can get wrong."""

    doc: str | None
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]

    @property
    def summary(self) -> str:
        return (self.doc or "").partition("\n")[0]

    def declare(self, parser: argparse.ArgumentParser) -> None:
        """Give a parser the help and the options."""
        parser.description, parser.formatter_class = self.doc, argparse.RawDescriptionHelpFormatter
        self.add_arguments(parser)


def quiet_transformers() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def run_script(
    name: str, command: Command, arguments: Sequence[str] | None = None, *, conflict_handler: str = "error"
) -> int:
    """Run a command as the script `name`. What a user can get wrong ends it with one sentence and no traceback.
    `conflict_handler` is argparse's, for options that are declared twice."""
    parser = argparse.ArgumentParser(prog=f"{name}.py", conflict_handler=conflict_handler)
    command.declare(parser)
    args = parser.parse_args(arguments)
    quiet_transformers()
    try:
        return command.run(args)
    except ValueError as error:
        raise SystemExit(f"{name}: {error}") from error
