"""How far decode steps are from the best that this machine could do.

    python tools/speed_of_light.py --rows 1 8 --num-draft 0 3 5 --context 128 1024

What the bound counts, and the meaning of `x light` and `x plain light`: graphspec/commands/bench/speed_of_light.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from lib.light_table import COLUMNS, fields_of

from graphspec import Engine, EngineConfig, SamplingParams
from graphspec.commands.bench.decode_load import decoding, prompts_of, timed_steps, tokens_needed
from graphspec.commands.bench.options import add_common, dtype_of, load, on_same_weights, settle
from graphspec.commands.bench.output import Output
from graphspec.commands.bench.plots import plot_lines
from graphspec.commands.bench.speed_of_light import StepBound, measured_rates
from graphspec.commands.command import Command, run_script


def run_command(args: argparse.Namespace) -> int:
    settle(args)
    dtype = dtype_of(args)
    rates = measured_rates(args.device, dtype)
    module = load(args)
    output = Output("speed_of_light", args, dtype, COLUMNS)
    output.text(f"reads {rates.bytes_per_s / 1e9:.1f} GB/s, multiplies {rates.operations_per_s / 1e9:.0f} GFLOP/s\n")
    output.heading()
    series: dict[str, list[tuple[float, float]]] = {}
    bounds: dict[str, list[tuple[float, float]]] = {}
    for k in args.num_draft:
        room = max(args.context) + tokens_needed(k, args.steps)
        drafts: dict[str, Any] = {"drafter": "forced", "forced_num_accepted": k // 2} if k else {"drafter": "none"}
        config = EngineConfig(
            num_speculative_tokens=k, max_num_seqs=max(args.rows), max_model_len=room, capture="lazy", **drafts
        )
        with Engine(on_same_weights(module), config=config) as engine:
            bound = StepBound.of(rates, engine)
            for rows, context in ((r, c) for r in args.rows for c in args.context):
                row = _line(engine, bound, rows, context, args.steps)
                facts = {"read_gb_per_s": rates.bytes_per_s / 1e9, "gflop_per_s": rates.operations_per_s / 1e9}
                output.line({"rows": rows, "num_draft": k, "context": context}, {**facts, **row})
                name = f"{rows} rows, 1 + {k}"
                series.setdefault(name, []).append((context, row["step_ms"]))
                bounds.setdefault(name, []).append((context, row["light_ms"]))
    plot_lines(args.plot, "Decode step, and its bound (dashed)", "tokens of context", "ms", series, bounds)
    return 0


def _line(engine: Engine, bound: StepBound, rows: int, context: int, steps: int) -> dict[str, Any]:
    k = engine.config.num_draft
    params = SamplingParams(max_tokens=tokens_needed(k, steps), ignore_eos=True)
    with decoding(engine, prompts_of(rows, context, bound.model.vocab_size), params):
        turn = timed_steps(engine, steps)
    return fields_of(turn, bound, rows, k, context)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-draft", type=int, nargs="+", default=[0, 3], help="forced drafts, half of them accepted")
    parser.add_argument("--context", type=int, nargs="+", default=[128], help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=16)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("speed_of_light", Command(__doc__, add_arguments, run_command), arguments)


if __name__ == "__main__":
    sys.exit(main())
