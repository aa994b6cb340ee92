"""Serve a prompt file at a given concurrency, variants side by side.

    graphspec bench generate --prompts-file mt_bench.jsonl --num-prompts 16 --concurrency 8 --ab depth=0,1
    graphspec bench generate --ab num_speculative_tokens=0,3,5 --rounds 3 --json
    graphspec bench generate --variant num_speculative_tokens=0 --variant adaptive_speculation=true --turn 1 \
        --concurrency 1

Every variant has an engine of its own on the same weights, is warmed up, and takes its turn in every round, so drift of
the machine meets all of them alike. A turn is all prompts, or as many as `--turn` says, for a closer look. Ratios are
to the first variant in the same turn, their median and their extremes; `ratio_total` is that of all tokens over all
seconds.

    ttft                 time to first token, from arrival
    tpot                 time per output token after the first, per request
    itl                  time between two outputs of a request, of one or more tokens each: a step
    vs_light             time of the run / the sum of the bounds of its launches: what they must read or multiply
    light_tokens_per_s   what that bound would give, with this acceptance
    device_idle_share    of the device's time, spent waiting for the host
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphspec.commands.bench.options import add_common, load, load_tokenizer, on_same_weights, settle
from graphspec.commands.bench.output import Output, percentile, progress, side_by_side
from graphspec.commands.bench.plots import plot_bars
from graphspec.commands.bench.serving_load import Served, capture_graphs, serve
from graphspec.commands.bench.speed_of_light import StepBound, measured_rates
from graphspec.commands.command import Command
from graphspec.commands.prompt_files import BUILTIN_PROMPTS, read_prompts
from graphspec.engine.engine import Engine
from graphspec.records.config import EngineConfig
from graphspec.records.sampling_params import SamplingParams

Setting = dict[str, Any]


def summary(runs: Sequence[Served], first: Sequence[Served], bound: StepBound) -> dict[str, Any]:
    """Medians over rounds, and ratios to the first variant round by round."""
    counts = {name: sum(run.counts[name] for run in runs) for name in runs[0].counts}
    ratios = [a.tokens_per_second / b.tokens_per_second for a, b in zip(runs, first, strict=True)]
    lights = [sum(bound.launch_seconds(*launch) for launch in run.launches) for run in runs]
    drafts, device = counts["num_drafts"], counts["busy"] + counts["idle"]
    times = {
        f"{name}_p{share}_ms": 1e3 * percentile([value for run in runs for value in getattr(run, name)], share)
        for name in ("ttft", "tpot", "itl")
        for share in (50, 90, 99)
    }
    return {
        "tokens_per_s": statistics.median(run.tokens_per_second for run in runs),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "ratio_total": _total_rate(runs) / _total_rate(first),
        "same_tokens": all(a.token_ids == b.token_ids for a, b in zip(runs, first, strict=True)),
        **times,
        "mean_acceptance_length": 1 + counts["num_accepted_tokens"] / drafts if drafts else 1.0,
        "draft_acceptance_rate": counts["num_accepted_tokens"] / max(1, counts["num_draft_tokens"]),
        "wasted_positions": int(counts["wasted_positions"]),
        "off_graph_decode_steps": int(counts["off_graph_decode_steps"]),
        "device_idle_share": counts["idle"] / device if device else 0.0,
        "vs_light": statistics.median(run.seconds / light for run, light in zip(runs, lights, strict=True)),
        "light_tokens_per_s": statistics.median(r.num_tokens / light for r, light in zip(runs, lights, strict=True)),
    }


def _total_rate(runs: Sequence[Served]) -> float:
    return sum(run.num_tokens for run in runs) / sum(run.seconds for run in runs)


def variants(ab: str | None, several: Sequence[Sequence[str]]) -> list[Setting]:
    """Settings of `--ab`, which varies one field, and one for each `--variant`. Raises ValueError for nonsense."""
    settings: list[Setting] = []
    if ab is not None:
        name, values = _assigned("--ab", ab, "values, such as depth=0,1")
        settings += ({name: _value(value)} for value in values.split(","))
    for fields in several:
        assigned = [_assigned("--variant", field, "its value, such as depth=1") for field in fields]
        settings.append({name: _value(value) for name, value in assigned})
    return settings or [{}]


def _assigned(option: str, text: str, what: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if name not in EngineConfig.__dataclass_fields__ or not value:
        raise ValueError(f'{option} takes a field of EngineConfig and {what}; got "{text}"')
    return name, value


def label(setting: Setting) -> str:
    return ", ".join(f"{name} = {value}" for name, value in setting.items()) or "median"


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower())
    except json.JSONDecodeError:
        return text


def build(args: argparse.Namespace, module: Any, tokenizer: Any, setting: Setting) -> Engine:
    """A warmed-up engine."""
    own: Setting = {"num_speculative_tokens": args.num_speculative_tokens, "depth": args.depth, **setting}
    if own["num_speculative_tokens"] == 0:
        own["drafter"] = "none"
    config = EngineConfig(max_num_seqs=args.concurrency, max_model_len=args.max_model_len, **own)
    engine = Engine(on_same_weights(module), tokenizer, config)
    capture_graphs(engine, "plain" if args.temperature else "greedy")
    return engine


def encode(engine: Engine, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of prompts, through the chat template where there is one."""
    chat = engine.has_chat_template
    return [engine.encode([{"role": "user", "content": text}] if chat else text) for text in texts]


def measure(args: argparse.Namespace, engines: Sequence[Engine]) -> list[list[Served]]:
    """Runs of every engine, one for each of its turns; the first turn, a short one, warms up and is not kept."""
    prompts = encode(engines[0], read_prompts(args.prompts_file, args.num_prompts))
    runs: list[list[Served]] = [[] for _ in engines]
    with progress(args.rounds * len(engines) * len(prompts), "requests") as bar:
        for engine in engines:
            serve(engine, prompts[: args.concurrency], SamplingParams(max_tokens=4), args.concurrency)
        params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=1)
        size = args.turn or len(prompts)
        for start in [*range(0, len(prompts), size)] * args.rounds:
            for engine, mine in zip(engines, runs, strict=True):
                mine.append(serve(engine, prompts[start : start + size], params, args.concurrency, bar.update))
    return runs


def run_command(args: argparse.Namespace) -> int:
    settle(args)
    settings = variants(args.ab, args.variant)
    if args.turn < 0:
        raise ValueError(f"--turn takes a number of prompts, not {args.turn}")
    module, tokenizer = load(args), load_tokenizer(args.model)
    dtype = next(module.parameters()).dtype
    rates = measured_rates(args.device, dtype)
    engines: list[Engine] = []
    try:
        engines += (build(args, module, tokenizer, setting) for setting in settings)
        runs = measure(args, engines)
        bounds = [StepBound.of(rates, engine) for engine in engines]
    finally:
        for engine in engines:
            engine.close()
    found = [summary(mine, runs[0], bound) for mine, bound in zip(runs, bounds, strict=True)]
    labels = [label(setting) for setting in settings]
    output = Output("bench_generate", args, dtype, {})
    output.table(side_by_side(labels, found), list(zip(settings, found, strict=True)))
    bars = {name: {"tokens/s": r["tokens_per_s"]} for name, r in zip(labels, found, strict=True)}
    plot_bars(args.plot, f"{args.num_prompts} prompts, {args.concurrency} at once", "output tokens per second", bars)
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `graphspec bench generate` takes."""
    add_common(parser)
    parser.add_argument("--prompts-file", type=Path, default=BUILTIN_PROMPTS, help="text lines, or MT-bench jsonl")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--max-model-len", type=int, help="default: the model's limit")
    parser.add_argument("--ab", help="a field of EngineConfig and its values, such as depth=0,1")
    parser.add_argument(
        "--variant",
        nargs="+",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="fields of EngineConfig of one variant; several times",
    )
    parser.add_argument("--turn", type=int, default=0, metavar="PROMPTS", help="prompts per turn; default: all")
    parser.add_argument("--rounds", type=int, default=3)


COMMAND = Command(__doc__, add_arguments, run_command)
