"""What `gpu_check.py` found: a file of JSON lines that grows while it runs, and the tables made of it."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from graphspec.commands.bench import attention, step
from graphspec.commands.bench.output import cell
from lib import light_table

Row = dict[str, Any]


class Report:
    """The folder `out`: `rows.jsonl` has a line per check, in `running.json` stands the one that runs now."""

    def __init__(self, out: Path, provenance: Mapping[str, str]) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self._provenance = out, provenance
        self._lines, self._running = out / "rows.jsonl", out / "running.json"

    def clear(self) -> None:
        for path in (self._lines, self._running):
            path.unlink(missing_ok=True)

    def rows(self) -> list[Row]:
        if not self._lines.exists():
            return []
        return [json.loads(line) for line in self._lines.read_text(encoding="utf-8").splitlines()]

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows() if row["ok"] is False]

    @property
    def running(self) -> str | None:
        """The check that had begun and not ended."""
        return json.loads(self._running.read_text(encoding="utf-8")) if self._running.exists() else None

    def run(self, name: str, check: Callable[[], Row]) -> Row:
        """One check. One that raises is a failed line; the others go on."""
        self._running.write_text(json.dumps(name), encoding="utf-8")
        started = time.perf_counter()
        try:
            row = check()
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"[:500]
            row = {"ok": False, "error": error, "traceback": traceback.format_exc()}
        return self.add(name, {"took_s": round(time.perf_counter() - started, 2), **row})

    def add(self, name: str, row: Row) -> Row:
        """Write and print a line. `ok` is None for a check that there was no time for."""
        row = {"check": name, **row}
        with self._lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"tool": "gpu_check", **self._provenance, **row}) + "\n")
        self._running.unlink(missing_ok=True)
        if row["ok"] is not None:
            print(f"{'ok  ' if row['ok'] else 'FAIL'}  {name:<52} {brief(row)}", flush=True)
        return row


def brief(row: Row) -> str:
    """What a person reads of a line: its error, or its numbers."""
    hidden = ("tool", "commit", "device", "dtype", "torch", "check", "ok", "traceback", "stack", "error")
    if not row["ok"] and "error" in row:
        return str(row["error"]).replace("|", "/").replace("\n", " ")
    found = {k: v for k, v in row.items() if k not in hidden and not isinstance(v, (dict, list))}
    return ", ".join(f"{name} {cell(value)}" for name, value in found.items()).replace("|", "/")


# Tables, as the tools print them that measure the same.


def tables(rows: Sequence[Row]) -> str:
    lengths = [line for row in rows for line in row.get("lengths", ())]
    steps = [row["step"] | {"mode": row["mode"]} for row in rows if "step" in row]
    parts = [row["apart"] for row in rows if "apart" in row]
    light = {"model": "model", "mode": "mode", **light_table.COLUMNS}
    found = [
        ("Attention of one layer against length (bench_attention.py)", attention.COLUMNS, lengths),
        ("Steps and their bound (speed_of_light.py)", light, steps),
        ("Steps taken apart (bench_step.py)", {"model": "model", **step.COLUMNS}, parts),
    ]
    texts = [f"{title}\n\n{grid(columns, lines)}" for title, columns, lines in found if lines]
    named = [(f"{row['model']} {row['rows']}x{1 + row['num_draft']} {row['mode']}", row) for row in parts]
    return "\n\n".join([*texts, *step.parts_beside(named)])


def grid(columns: Mapping[str, str], lines: Sequence[Row]) -> str:
    rows = [list(columns.values()), *([cell(line.get(field)) for field in columns] for line in lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows)


def summary(rows: Sequence[Row]) -> str:
    """A markdown table with one line per check."""
    words = {True: "yes", False: "NO", None: "not reached"}
    lines = [f"| {row['check']} | {words[row['ok']]} | {brief(row)} |" for row in rows]
    return "\n".join(["| check | ok | " + " |", "| --- | --- | --- |", *lines])
