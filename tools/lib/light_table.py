"""Decode steps beside their bound, as `speed_of_light.py` and `gpu_check.py` show them."""

from __future__ import annotations

import statistics
from typing import Any

from graphspec.commands.bench.decode_load import Turn
from graphspec.commands.bench.speed_of_light import StepBound

COLUMNS = {
    "rows": "rows", "num_draft": "k", "context": "context", "weight_mb": "weights MB", "packed_mb": "packed MB",
    "kv_mb": "KV MB", "logit_mb": "logits MB", "gflop": "GFLOP", "limit": "limit", "light_ms": "bound ms",
    "step_ms": "step ms", "emitted": "emitted", "vs_light": "x light", "token_ms": "ms/token",
    "token_vs_plain_light": "x plain light",
}  # fmt: skip


def fields_of(turn: Turn, bound: StepBound, rows: int, k: int, context: int) -> dict[str, Any]:
    """The fields of one line: steps of a turn that began behind `context` tokens of prompt."""
    seconds, emitted = statistics.median(turn.busy), turn.emitted_per_row(rows)
    middle = context + emitted * (len(turn.busy) / 2 + 2)
    work = bound.work(rows, k, middle)
    reads = work.num_bytes / bound.rates.bytes_per_s >= work.operations / bound.rates.operations_per_s
    return {
        "weight_mb": work.weight_bytes / 1e6, "packed_mb": bound.model.packed / 1e6,
        "kv_mb": work.kv_bytes / 1e6, "logit_mb": work.logit_bytes / 1e6,
        "gflop": work.operations / 1e9, "limit": "memory" if reads else "matrix", "step_ms": 1e3 * seconds,
        "emitted": emitted, "token_ms": 1e3 * seconds / emitted, **bound.ratios(seconds, rows, k, middle, emitted),
    }  # fmt: skip
