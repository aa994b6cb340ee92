"""What one captured graph consists of."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from graphs.capture import CapturedGraph
from graphs.recorded import RecordedProgram

Counts = tuple[tuple[str, int], ...]  # what, and how often; the most frequent first


@dataclass(frozen=True)
class GraphSummary:
    """The ops of a graph by module, kind and source line, the Python values it baked, and what it costs."""

    key: Hashable
    num_ops: int
    capture_seconds: float
    pool_bytes: int
    buffer_bytes: int  # of the persistent buffers, which it shares with other graphs
    outside_tensors: int  # that it uses and did not make
    num_baked: int
    modules: Counts  # the layers of a model, which differ in a number only, count as one
    ops: Counts
    lines: Counts
    baked: Counts

    def lines_of_text(self) -> Iterator[str]:
        for name in ("num_ops", "capture_seconds", "pool_bytes", "buffer_bytes", "outside_tensors", "num_baked"):
            yield f"{name:<18}{getattr(self, name)}"
        for title in ("modules", "ops", "lines", "baked"):
            yield f"\n{title}"
            yield from (f"{count:>6}  {what}" for what, count in getattr(self, title))


def summarise(graph: CapturedGraph, record: RecordedProgram | None = None, top: int = 20) -> GraphSummary:
    """Summarise a graph by the `top` most frequent of each kind.

    `record` is a record of the same function, for a graph that is none: CUDA knows only kernels. Raises ValueError
    if it is missing.
    """
    program = graph.program if isinstance(graph.program, RecordedProgram) else record
    if program is None:
        raise ValueError("only a record knows its ops: pass one of the same function, graphs.record(function)")
    return GraphSummary(
        key=graph.key,
        num_ops=program.num_ops or 0,
        capture_seconds=graph.capture_seconds,
        pool_bytes=graph.program.pool_bytes,
        buffer_bytes=graph.buffers.num_bytes,
        outside_tensors=len(program.outside),
        num_baked=len(program.baked),
        modules=_counts((re.sub(r"\.\d+", ".*", node.module) or "(step)" for node in program.nodes), top),
        ops=_counts((str(node.op) for node in program.nodes), top),
        lines=_counts((node.line for node in program.nodes), top),
        baked=_counts((f"{value.op}  {value.value!r}  {value.line}" for value in program.baked), top),
    )


def _counts(what: Iterable[str], top: int) -> Counts:
    return tuple(Counter(what).most_common(top))
