"""Start engines in processes one after another: time of each phase to the first tokens, and peak memory.

    graphspec bench startup --modes graph unpacked compiled --rounds 3

Every start is a process of its own. In each round every mode starts twice on a user cache of its own, which is empty at
first: "cold" converts the built-in model and compiles what is compiled, "warm" finds both. The page cache and Python's
bytecode are warm in both; models in the Hugging Face cache are found there. Medians over rounds.

    import        from the start of the process until `graphspec` is imported, torch and transformers with it
    load          weights and tokenizer in memory, the built-in model converted where it was not
    engine        `Engine.__init__`: KV cache, slots, stream, graphs if they are captured before serving
    1st token     prompt in, first token out
    1st step      until the first decode step has answered: its graph is captured, weights are packed
    total         all of them; `x bound` is its ratio to 10 s warm and 60 s cold
    2nd TTFT      time to the first token of a second request
    peak MB       most memory resident at any time (VmHWM); `x bound` is its ratio to 2.2 weights + KV + 1 GB
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HOME

from graphspec.commands.bench.options import add_common, dtype_of, settle
from graphspec.commands.bench.output import Output, progress
from graphspec.commands.bench.peer import Answer, Peer
from graphspec.commands.bench.plots import plot_bars
from graphspec.commands.command import Command

ROOT = Path(__file__).resolve().parents[3]  # where the packages lie

PROMPT = "Explain in one sentence why the sky is blue."
CACHES = {"cold": 60.0, "warm": 10.0}  # seconds that a start may take

MODES: dict[str, dict[str, Any]] = {
    "graph": {"compile": False},
    "unpacked": {"compile": False, "pack_weights": False},
    "eager": {"compile": False, "enforce_eager": True},
    "compiled": {"compile": True},
    "compiled-unpacked": {"compile": True, "pack_weights": False},
}

COLUMNS = {
    "mode": f"{'mode':>17}", "cache": "cache", "import_s": "import s", "load_s": "load s", "engine_s": "engine s",
    "first_token_s": "1st token s", "first_step_s": "1st step s", "total_s": "total s", "vs_bound": "x bound",
    "second_ttft_ms": "2nd TTFT ms", "weight_mb": "weights MB", "kv_mb": "KV MB", "peak_mb": "peak MB",
    "peak_vs_bound": "x bound",
}  # fmt: skip


def measure(request: Mapping[str, Any], cache: Path) -> Answer:
    """One start on the user cache `cache`: seconds by phase, and memory."""
    caches = {"XDG_CACHE_HOME": cache, "TORCHINDUCTOR_CACHE_DIR": cache / "inductor", "HF_HOME": HF_HOME}
    # The code that is measured is the one that runs here, wherever the command was called: -P keeps the current folder
    # off the child's path.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, **{name: str(folder) for name, folder in caches.items()}}
    command = [sys.executable, "-P", "-m", "graphspec.commands.bench.startup_child"]
    started = time.monotonic()
    with Peer("the engine", command, environment) as peer:
        peer.ask(dict(request))
        found = peer.ask({})
    times = [started, *found["at"].values()]
    phases = {name: b - a for name, a, b in zip(found["at"], times, times[1:], strict=False)}
    return {**found, "phases": phases, "total_s": times[-1] - started}


def summary(runs: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Medians of starts that may take `seconds` each."""
    weights, kv = runs[0]["weight_bytes"], runs[0]["kv_bytes"]
    total, peak = (statistics.median(run[name] for run in runs) for name in ("total_s", "peak_bytes"))
    phases = {name: statistics.median(run["phases"][name] for run in runs) for name in runs[0]["phases"]}
    return {
        "import_s": phases["import"], "load_s": phases["load"], "engine_s": phases["engine"],
        "first_token_s": phases["first token"], "first_step_s": phases["first decode step"], "total_s": total,
        "vs_bound": total / seconds, "second_ttft_ms": 1e3 * statistics.median(run["second_ttft_s"] for run in runs),
        "weight_mb": weights / 1e6, "kv_mb": kv / 1e6, "peak_mb": peak / 1e6,
        "peak_vs_bound": peak / (2.2 * weights + kv + 1e9),
    }  # fmt: skip


def run_command(args: argparse.Namespace) -> int:
    settle(args)
    config = {
        "num_speculative_tokens": args.num_speculative_tokens, "max_num_seqs": args.max_num_seqs,
        "max_model_len": args.max_model_len, "device": args.device, "dtype": args.dtype,
    }  # fmt: skip
    runs: dict[tuple[str, str], list[Answer]] = {case: [] for case in itertools.product(args.modes, CACHES)}
    output = Output("bench_startup", args, dtype_of(args), COLUMNS)
    output.heading()
    bars: dict[str, dict[str, float]] = {}
    with progress(args.rounds * len(runs), "starts") as bar:
        for number, mode in itertools.product(range(args.rounds), args.modes):
            request = {"model": args.model, "prompt": PROMPT, "config": {**config, **MODES[mode]}}
            with tempfile.TemporaryDirectory() as folder:
                for cache in CACHES:
                    runs[mode, cache].append(measure(request, Path(folder)))
                    bar.update()
            for cache, seconds in CACHES.items() if number == args.rounds - 1 else ():
                mine = runs[mode, cache]
                output.line({"mode": mode, "cache": cache}, summary(mine, seconds))
                bars[f"{mode}, {cache}"] = mine[-1]["phases"]
    plot_bars(args.plot, "From nothing to the first tokens", "seconds", bars)
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `graphspec bench startup` takes."""
    add_common(parser)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["graph", "unpacked"])
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, default=1)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)


COMMAND = Command(__doc__, add_arguments, run_command)
