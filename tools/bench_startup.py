"""`graphspec bench startup` as a script."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from graphspec.commands.bench.startup import COMMAND
from graphspec.commands.command import run_script


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("bench_startup", COMMAND, arguments)


if __name__ == "__main__":
    sys.exit(main())
