"""Serve the built-in prompts and show, step by step, which graph replayed or why none did.

graphspec graphs coverage --max-num-seqs 8
graphspec graphs coverage --max-num-seqs 8 --html report.html     with plan and guard, for a browser
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from graphs.debug import Coverage, page
from graphspec.commands.command import Command
from graphspec.commands.graphs.guard import guard_step
from graphspec.commands.graphs.plan import add_plan_options, plan_of
from graphspec.commands.graphs.running_engine import add_engine_options
from graphspec.commands.prompt_files import BUILTIN_PROMPTS, read_prompts
from graphspec.engine.engine import Engine
from graphspec.records.config import EngineConfig
from graphspec.records.outputs import Completion
from graphspec.records.sampling_params import SamplingParams


@dataclass(frozen=True)
class Served:
    """A real load, and what became of its decode steps."""

    coverage: Coverage
    completions: list[Completion]


def serve(args: argparse.Namespace) -> Served:
    config = EngineConfig(
        num_speculative_tokens=args.num_speculative_tokens, max_num_seqs=args.max_num_seqs, device=args.device,
        enforce_eager=args.enforce_eager,
    )  # fmt: skip
    with Engine.from_pretrained(args.model, config) as engine:
        done = engine.generate(read_prompts(BUILTIN_PROMPTS), SamplingParams(max_tokens=args.max_tokens))
        return Served(Coverage.of(engine._runner.decode_step.store), done)


def run_command(args: argparse.Namespace) -> int:
    if args.html and not args.html.parent.is_dir():
        raise ValueError(f'--html takes the name of a file in a folder that exists, got "{args.html}"')
    served = serve(args)
    if args.html:
        title = f"Graphs of {args.model}"
        text = page(title, plan_of(args).sizes, served.coverage, guard_step(args), steps="decode steps")
        args.html.write_text(text, encoding="utf-8")
    print(json.dumps(_as_json(served)) if args.json else "\n".join(_lines(served)))
    return 0


def _as_json(served: Served) -> dict[str, object]:
    coverage = served.coverage
    return {
        "steps": len(coverage.timeline),
        "timeline": [{"key": key, "off_graph": reason} for key, reason in coverage.timeline],
        "graphs": [dataclasses.asdict(line) for line in coverage.ledger],
        "never_replayed": coverage.never_replayed,
        "requests": [
            {"id": c.request_id, "steps": c.num_decode_steps, "off_graph": c.num_off_graph_steps}
            for c in served.completions
        ],
    }


def _lines(served: Served) -> Iterator[str]:
    coverage, requests = served.coverage, served.completions
    yield f"{coverage.num_on_graph} of {len(coverage.timeline)} decode steps replayed a graph\n"
    yield from coverage.timeline_lines()
    on = sum(not completion.num_off_graph_steps for completion in requests)
    yield f"\n{on} of {len(requests)} requests never left their graphs"
    if coverage.ledger:
        yield ""
        yield from coverage.ledger_lines()
        static, pools = coverage.static_bytes / 2**20, coverage.pool_bytes / 2**20
        yield f"\nmemory: {static:.1f} MiB of buffers shared by all graphs, {pools:.1f} MiB of their own"
    if coverage.never_replayed:
        yield f"captured and never replayed: {list(coverage.never_replayed)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `graphspec graphs coverage` takes."""
    add_plan_options(parser)
    add_engine_options(parser)
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens per answer")
    parser.add_argument("--enforce-eager", action="store_true", help="without graphs, for comparison")
    parser.add_argument("--html", type=Path, help="also write a page with plan, timeline, costs and findings")


COMMAND = Command(__doc__, add_arguments, run_command)
