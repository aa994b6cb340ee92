"""Serve a prompt file at a given concurrency, variants side by side.

    python tools/bench_generate.py --prompts-file mt_bench.jsonl --num-prompts 16 --concurrency 8 --ab depth=0,1
    python tools/bench_generate.py --ab num_speculative_tokens=0,3,5 --rounds 3 --json

As many requests as `--concurrency` are in the engine at any time; the next one arrives when one ends. Every variant has
an engine and a copy of the model of its own, is warmed up, and takes its turn in every round, so drift of the machine
meets all of them alike. Ratios are to the first variant in the same round.

    TTFT   time to first token, from arrival, seconds
    TPOT   time per output token after the first: (last - first) / (tokens - 1), per request
    ITL    time between two outputs of a request, of one or more tokens each
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from bench_common import provenance
from transformers import AutoTokenizer

from graphspec import Engine, EngineConfig, SamplingParams
from graphspec.builtin_model import NAME
from graphspec.config import DTYPES, resolve_device
from graphspec.model import load_module, model_path
from graphspec.prompts import BUILTIN_PROMPTS, read_prompts

Setting = dict[str, Any]


@dataclass
class Served:
    """What one run of the load gave."""

    seconds: float
    token_ids: list[list[int]]
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


def serve(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, concurrency: int) -> Served:
    """Run the load once, closed loop."""
    before, started = totals(engine), time.perf_counter()
    waiting, order = list(prompts), []
    arrived: dict[str, float] = {}
    times: dict[str, list[float]] = {}
    tokens: dict[str, list[int]] = {}
    running = 0
    while waiting or running:
        while waiting and running < concurrency:
            request_id = engine.add_request(waiting.pop(0), params)
            arrived[request_id] = time.perf_counter()
            times[request_id], tokens[request_id] = [], []
            order.append(request_id)
            running += 1
        for output in engine.step():
            running -= output.finished
            if output.new_token_ids:
                times[output.request_id].append(time.perf_counter())
                tokens[output.request_id] += output.new_token_ids
    served = Served(time.perf_counter() - started, [tokens[i] for i in order])
    engine.drain()
    for i in order:
        served.ttft.append(times[i][0] - arrived[i])
        served.itl += [b - a for a, b in zip(times[i], times[i][1:], strict=False)]
        if len(tokens[i]) > 1:
            served.tpot.append((times[i][-1] - times[i][0]) / (len(tokens[i]) - 1))
    served.counts = {name: value - before[name] for name, value in totals(engine).items()}
    engine.reset_prefix_cache()
    return served


def totals(engine: Engine) -> dict[str, float]:
    stats, times = engine.stats(), engine._times
    return {
        "num_drafts": stats.num_drafts,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "wasted_positions": stats.wasted_positions,
        "off_graph_decode_steps": stats.off_graph_decode_steps,
        "busy": times.total_busy,
        "idle": times.total_idle,
    }


def summary(runs: Sequence[Served], first: Sequence[Served]) -> dict[str, Any]:
    """Medians over rounds, and ratios to the first variant round by round."""
    counts = {name: sum(run.counts[name] for run in runs) for name in runs[0].counts}
    ratios = [a.tokens_per_second / b.tokens_per_second for a, b in zip(runs, first, strict=True)]

    def quantile(name: str, share: int) -> float:
        values = sorted(value for run in runs for value in getattr(run, name))
        return values[min(len(values) - 1, len(values) * share // 100)] if values else 0.0

    drafts, device = counts["num_drafts"], counts["busy"] + counts["idle"]
    return {
        "tokens_per_s": statistics.median(run.tokens_per_second for run in runs),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "same_tokens": all(a.token_ids == b.token_ids for a, b in zip(runs, first, strict=True)),
        **{
            f"{name}_p{share}_ms": 1e3 * quantile(name, share) for name in ("ttft", "tpot", "itl") for share in (50, 99)
        },
        "mean_acceptance_length": 1 + counts["num_accepted_tokens"] / drafts if drafts else 1.0,
        "wasted_positions": int(counts["wasted_positions"]),
        "off_graph_decode_steps": int(counts["off_graph_decode_steps"]),
        "device_idle_share": counts["idle"] / device if device else 0.0,
    }


def variants(text: str | None) -> tuple[str, list[Setting]]:
    """The name of the configuration field that varies, and one setting per value. Raises ValueError for nonsense."""
    if text is None:
        return "", [{}]
    name, _, values = text.partition("=")
    if name not in EngineConfig.__dataclass_fields__ or not values:
        raise ValueError(f'--ab takes a field of EngineConfig and values, such as depth=0,1; got "{text}"')
    return name, [{name: _value(value)} for value in values.split(",")]


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower())
    except json.JSONDecodeError:
        return text


def build(args: argparse.Namespace, module: Any, tokenizer: Any, setting: Setting) -> Engine:
    """A warmed-up engine: every row count of the kind the load uses has its graph."""
    own: Setting = {"num_speculative_tokens": args.num_speculative_tokens, "depth": args.depth, **setting}
    if own["num_speculative_tokens"] == 0:
        own["drafter"] = "none"
    config = EngineConfig(max_num_seqs=args.concurrency, max_model_len=args.max_model_len, **own)
    engine = Engine(module, tokenizer, config)
    step, sampler = engine._runner.decode_step, "plain" if args.temperature else "greedy"
    if not engine.config.user.enforce_eager:
        keys = [key for key in engine._runner.graph_plan.all_keys() if key.sampler == sampler and key not in step.store]

        def capture() -> None:
            for key in keys:
                step.capture(key)

        engine._runner.on_stream(capture)
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=NAME)
    parser.add_argument("--prompts-file", type=Path, default=BUILTIN_PROMPTS, help="text lines, or MT-bench jsonl")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--max-model-len", type=int, help="default: the model's limit")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--ab", help="a field of EngineConfig and its values, such as depth=0,1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name, settings = variants(args.ab)
    device = resolve_device(args.device)
    module = load_module(args.model, DTYPES.get(args.dtype), device)
    tokenizer = AutoTokenizer.from_pretrained(model_path(args.model))
    engines = [build(args, copy.deepcopy(module), tokenizer, setting) for setting in settings]
    texts = read_prompts(args.prompts_file, args.num_prompts)
    chat = engines[0].has_chat_template
    prompts = [engines[0].encode([{"role": "user", "content": t}] if chat else t) for t in texts]
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=1)
    runs: list[list[Served]] = [[] for _ in settings]
    for _ in range(args.rounds):
        for engine, mine in zip(engines, runs, strict=True):
            mine.append(serve(engine, prompts, params, args.concurrency))
    for engine in engines:
        engine.close()
    show(args, name, settings, runs, device.type)


def show(args: argparse.Namespace, name: str, settings: list[Setting], runs: list[list[Served]], device: str) -> None:
    found = [summary(mine, runs[0]) for mine in runs]
    if args.json:
        config = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
        for setting, result in zip(settings, found, strict=True):
            line = {"tool": "bench_generate", **provenance(device), "config": {**config, **setting}, **result}
            print(json.dumps(line), flush=True)
        return
    labels = [f"{name} = {setting[name]}" if name else "" for setting in settings]
    print(f"{'':<26}" + "".join(f"{label:>28}" for label in labels))
    for key in found[0]:
        cells = [f"{r[key]:.4g}" if isinstance(r[key], float) else str(r[key]) for r in found]
        print(f"{key:<26}" + "".join(f"{cell:>28}" for cell in cells))


if __name__ == "__main__":
    main()
