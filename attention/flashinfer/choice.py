"""Which backend a decode step of a given shape uses: a rule, and a table of measurements that overrules it.

The rule is reasoned, not measured: nothing here has run on a GPU yet. A measured table is a list of lines

    {"rows": [1, 8], "query_len": [4, 6], "num_heads": 32, "num_kv_heads": 8, "head_dim": 128,
     "context": [0, 8192], "backend": "flashinfer_xqa"}

as JSON; ranges include both ends, and the first line that fits decides.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from attention.backend import AttentionShape, UnsupportedAttentionError
from attention.flashinfer.guards import FA2, FA2_SPLIT, NAMES, XQA, Machine, unsupported
from attention.flashinfer.planner import cta_tile_q
from attention.types import Bucket

RANGES, EXACT = ("rows", "query_len", "context"), ("num_heads", "num_kv_heads", "head_dim")


class Choice(NamedTuple):
    backend: str
    reason: str


@dataclass(frozen=True)
class Line:
    """One measured line: where it holds, and the backend that was fastest there."""

    rows: tuple[int, int]
    query_len: tuple[int, int]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: tuple[int, int]  # the longest length an engine allows
    backend: str

    @staticmethod
    def parse(entry: Mapping[str, Any]) -> Line:
        """Raises ValueError, in one sentence, for an entry that is not a line."""
        if set(entry) != {*RANGES, *EXACT, "backend"}:
            odd = sorted({*RANGES, *EXACT, "backend"} ^ set(entry))[0]
            raise ValueError(f'a line of the attention table needs exactly its seven fields; "{odd}" is amiss')
        if entry["backend"] not in NAMES:
            raise ValueError(f'the attention table names "{entry["backend"]}": use one of {", ".join(NAMES)}')
        for name in RANGES:
            if len(entry[name]) != 2 or entry[name][0] > entry[name][1]:
                raise ValueError(f"{name} of the attention table must be [first, last], got {entry[name]}")
        values: dict[str, Any] = {name: (int(entry[name][0]), int(entry[name][1])) for name in RANGES}
        values |= {name: int(entry[name]) for name in EXACT}
        return Line(**values, backend=entry["backend"])

    def fits(self, bucket: Bucket, shape: AttentionShape) -> bool:
        values = {"rows": bucket.rows, "query_len": bucket.query_len, "context": shape.longest}
        inside = all(getattr(self, name)[0] <= value <= getattr(self, name)[1] for name, value in values.items())
        return inside and all(getattr(self, name) == getattr(shape, name) for name in EXACT)


class ChoiceTable:
    """Buckets -> backends, for one shape on one machine. `only` is the one backend that the user insists on."""

    def __init__(
        self, shape: AttentionShape, machine: Machine, lines: Iterable[Line] = (), only: str | None = None
    ) -> None:
        self.shape, self.machine = shape, machine
        self._lines, self._only = tuple(lines), only

    def choose(self, bucket: Bucket) -> Choice:
        """Raises UnsupportedAttentionError if no FlashInfer backend can serve the bucket."""
        if self._only is not None:
            self._check(self._only)
            return Choice(self._only, "configured")
        for line in self._lines:
            if line.fits(bucket, self.shape) and self._can(line.backend):
                return Choice(line.backend, "measured")
        return self._rule(bucket)

    def _rule(self, bucket: Bucket) -> Choice:
        shape = self.shape
        packed = bucket.query_len * shape.group
        tiles = -(-packed // cta_tile_q(packed, shape.head_dim))
        blocks, full = bucket.rows * tiles * shape.num_kv_heads, 2 * self.machine.num_sms
        if blocks >= full and self._can(FA2):
            return Choice(FA2, f"{blocks} blocks fill the GPU without a split")
        if self._can(XQA):
            return Choice(XQA, f"{blocks} of {full} blocks: keys are split, without a plan")
        if self._can(FA2_SPLIT):
            return Choice(FA2_SPLIT, f"{blocks} of {full} blocks: keys are split; XQA cannot serve this")
        self._check(FA2_SPLIT)
        raise AssertionError("unreachable")

    def describe(self, buckets: Iterable[Bucket]) -> str:
        """The table for `buckets`, one line each."""
        rows = [(str(b.rows), str(b.query_len), *self.choose(b)) for b in buckets]
        header = ("rows", "1+k", "backend", "why")
        widths = [max(len(row[i]) for row in (header, *rows)) for i in range(3)]
        return "\n".join(
            "  ".join((*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]))
            for row in (header, *rows)
        )

    def _can(self, name: str) -> bool:
        return unsupported(name, self.shape, self.machine) is None

    def _check(self, name: str) -> None:
        if (why := unsupported(name, self.shape, self.machine)) is not None:
            raise UnsupportedAttentionError(why)


def read_lines(source: str | Path | Iterable[Mapping[str, Any]] | None) -> tuple[Line, ...]:
    """Measured lines from a JSON file or from entries. Raises ValueError, in one sentence, for what is no table."""
    if source is None:
        return ()
    if isinstance(source, (str, Path)):
        try:
            source = json.loads(Path(source).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as caught:
            raise ValueError(f"cannot read the attention table: {caught}") from caught
    if not isinstance(source, list) or not all(isinstance(entry, Mapping) for entry in source):
        raise ValueError("the attention table must be a list of lines, see attention/flashinfer/choice.py")
    return tuple(Line.parse(entry) for entry in source)
