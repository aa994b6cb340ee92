"""What benchmarks print: JSON lines or a table, and the numbers in them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from graphspec.commands.provenance import provenance


class Output:
    """Lines of one benchmark on stdout: JSON, or cells of a table under `columns` (field -> heading)."""

    def __init__(self, tool: str, args: argparse.Namespace, dtype: torch.dtype, columns: Mapping[str, str]) -> None:
        self._tool, self._json, self._columns = tool, args.json, columns
        self._from = provenance(args.device, dtype)
        self._options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "plot"}
        self._width = {field: max(9, len(heading)) for field, heading in columns.items()}
        if not args.json:
            self.text(", ".join(self._from.values()))

    def heading(self) -> None:
        self.text("  ".join(heading.rjust(self._width[field]) for field, heading in self._columns.items()))

    def table(self, lines: Sequence[str], results: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
        """Results (config, values) that human readers see as `lines`."""
        self.text("\n".join(lines))
        if self._json:
            for config, values in results:
                self.line(config, values)

    def line(self, config: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        if self._json:
            whole = {"tool": self._tool, **self._from, "config": {**self._options, **config}, **values}
            print(json.dumps(whole), flush=True)
            return
        found = {**config, **values}
        self.text("  ".join(cell(found[field]).rjust(self._width[field]) for field in self._columns))

    def text(self, line: str = "") -> None:
        """A line for human readers."""
        if not self._json:
            print(line, flush=True)


def cell(value: Any) -> str:
    """A value as a table shows it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def side_by_side(names: Sequence[str], columns: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of a table with one column per variant and one row per value."""
    texts = {key: [cell(column[key]) for column in columns] for key in columns[0]}
    width = 2 + max(10, *(len(text) for row in (names, *texts.values()) for text in row))
    lines = [" " * 30 + "".join(name.rjust(width) for name in names)]
    return lines + [f"{key:<30}" + "".join(text.rjust(width) for text in row) for key, row in texts.items()]


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that `percent` of the values do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else 0.0


def progress(total: int, what: str) -> Any:
    """A bar on stderr for long runs, where somebody watches."""
    from tqdm import tqdm

    return tqdm(total=total, desc=what, file=sys.stderr, disable=not sys.stderr.isatty(), leave=False)
