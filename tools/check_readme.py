"""Keep the README true: run its Python snippets, parse its `graphspec` commands, and find its make targets."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from graphspec.commands.main import parser

ROOT = Path(__file__).resolve().parent.parent


def check_command(line: str, targets: set[str]) -> None:
    words = shlex.split(line, comments=True)
    if words[:1] == ["make"]:
        for word in (w for w in words[1:] if "=" not in w):
            assert word in targets, f"README names `make {word}`, which the Makefile lacks"
    if words[:1] == ["graphspec"]:
        parser().parse_args(words[1:])
    if words[:1] == ["python"] and len(words) > 1 and words[1].startswith("tools/"):
        assert (ROOT / words[1]).exists(), f"README names {words[1]}, which does not exist"


def main() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", text, re.M | re.S)
    for language, block in blocks:
        if language == "sh":
            for line in block.replace("\\\n", " ").splitlines():
                check_command(line, targets)
        if language == "python":
            exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    print(f"README: {len(blocks)} blocks hold", file=sys.stderr)


if __name__ == "__main__":
    main()
