"""Keep the README true: run its Python snippets, parse its `graphspec` commands, and find its make targets and scripts,
those in sentences included."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection, Iterator
from contextlib import redirect_stdout
from pathlib import Path

from graphspec.commands.main import parser

ROOT = Path(__file__).resolve().parent.parent

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
SPAN = re.compile(r"`((?:graphspec|make|python) [^`]+)`")


def commands(text: str) -> Iterator[str]:
    """Command lines of a page, first those of its blocks, then those in its sentences."""
    for language, block in BLOCK.findall(text):
        if language == "sh":
            yield from block.replace("\\\n", " ").splitlines()
    yield from SPAN.findall(BLOCK.sub("", text))


def check_command(line: str, targets: Collection[str]) -> None:
    """Raises AssertionError, naming the command, for one that does not exist or does not take these options."""
    words = shlex.split(line, comments=True)
    if words[:1] == ["make"]:
        for word in (w for w in words[1:] if "=" not in w):
            assert word in targets, f"README names `make {word}`, which the Makefile lacks"
    if words[:1] == ["graphspec"]:
        assert is_taken(words[1:]), f"README names `{line}`, which graphspec does not take"
    if words[:1] == ["python"] and len(words) > 1 and words[1].startswith("tools/"):
        assert (ROOT / words[1]).exists(), f"README names {words[1]}, which does not exist"


def is_taken(words: list[str]) -> bool:
    """Whether `graphspec` takes these words; what --version and --help print goes to stderr."""
    try:
        with redirect_stdout(sys.stderr):
            parser().parse_args(words)
    except SystemExit as ended:
        return not ended.code
    return True


def main() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    lines = list(commands(text))
    for line in lines:
        check_command(line, targets)
    snippets = [block for language, block in BLOCK.findall(text) if language == "python"]
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), {"__name__": "readme"})
    print(f"README: {len(lines)} commands and {len(snippets)} snippets hold", file=sys.stderr)


if __name__ == "__main__":
    main()
