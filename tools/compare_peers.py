"""The same prompts, weights and dtype on graphspec and on its peers, side by side.

    python tools/compare_peers.py --prompts-file mt_bench.jsonl --num-prompts 8 --num-speculative-tokens 3
    python tools/compare_peers.py --vllm-python path/to/python --concurrency 8

Peers are transformers' `generate`, plain and with `prompt_lookup_num_tokens`, vLLM where a Python that has it is named,
plain and with n-gram drafts, and graphspec with k = 0 and with n-gram drafts. Each runs in a process of its own with
the same number of threads, loads the model once, is warmed up, and takes its turn in every round while the others wait
on a pipe, so drift of the machine meets all of them alike. Greedy; a request ends at the end-of-sequence token.

Ratios are to the first peer in the same round: the median and the extremes. TTFT counts from when a request is taken
up, TPOT per token after the first. `accepted` is tokens per step and request (vLLM counts steps that had a draft).
`x plain light` is time per token over its bound without speculation, see graphspec/commands/bench/speed_of_light.py,
for all peers with weights read in --dtype. Texts of different engines part at near-ties of rounding; `same` is the
share of requests whose tokens are those of the first peer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from graphspec.commands.bench.options import add_common, dtype_of, load_tokenizer, settle
from graphspec.commands.bench.output import Output, percentile, progress
from graphspec.commands.bench.peer import Answer, Peer
from graphspec.commands.bench.plots import plot_bars
from graphspec.commands.bench.speed_of_light import ModelWork, StepBound, measured_rates
from graphspec.commands.command import Command, run_script
from graphspec.commands.prompt_files import BUILTIN_PROMPTS, read_prompts
from graphspec.models.loading import model_path

SETTLE_S = 0.5  # before a turn: threads of the peer before it stop spinning
KV_MARGIN = 256  # tokens per request, for the granularity of pages

COLUMNS = {
    "peer": f"{'peer':>34}", "tokens_per_s": "tokens/s", "ratio": "x first", "ratio_min": "min", "ratio_max": "max",
    "ttft_p50_ms": "TTFT ms", "tpot_p50_ms": "TPOT ms", "mean_acceptance_length": "accepted", "same": "same",
    "token_vs_plain_light": "x plain light",
}  # fmt: skip


class Kind(NamedTuple):
    """One line of the table."""

    name: str
    python: str
    script: str
    num_draft: int


def kinds(args: argparse.Namespace) -> list[Kind]:
    """The peers that can be asked with these options, the first one the base of the ratios."""
    found = []
    for name, python, drafts in (
        ("transformers", sys.executable, "prompt lookup"),
        ("vllm", args.vllm_python, "n-grams"),
        ("graphspec", sys.executable, "n-grams"),
    ):
        for k in dict.fromkeys((0, args.num_speculative_tokens)):
            one_at_a_time = name == "transformers" and k > 0
            if python is not None and not (one_at_a_time and args.concurrency > 1):
                found.append(Kind(f"{name}, k = {k} {drafts}" if k else name, python, f"peer_{name}.py", k))
    chosen = [kind for kind in found if args.peers is None or kind.script[5:-3] in args.peers]
    if not chosen:
        raise ValueError("no peer is left: vllm needs --vllm-python")
    return chosen


def environment(threads: int, python: str) -> dict[str, str]:
    own = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    found = {**os.environ, **own, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if python != sys.executable:
        found.pop("PYTHONPATH", None)  # packages of this Python are not those of that one
    return found


def encode(args: argparse.Namespace) -> tuple[list[list[int]], frozenset[int]]:
    """Token ids of the prompts, through the chat template where there is one."""
    tokenizer = load_tokenizer(args.model)
    texts = read_prompts(args.prompts_file, args.num_prompts)
    if not tokenizer.chat_template:
        return [tokenizer(text).input_ids for text in texts], frozenset({tokenizer.eos_token_id})
    chats = [[{"role": "user", "content": text}] for text in texts]
    ids = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"] for chat in chats
    ]
    return ids, frozenset({tokenizer.eos_token_id})


def measure(args: argparse.Namespace, prompts: list[list[int]], kv_token_bytes: int) -> dict[Kind, list[Answer]]:
    """Of every peer its versions, then its answers, one per round; a short turn before warms up and is not kept."""
    longest = max(map(len, prompts)) + args.max_tokens
    first = {
        "model": model_path(args.model), "dtype": str(dtype_of(args)).removeprefix("torch."),
        "max_model_len": longest, "concurrency": args.concurrency,
        "kv_bytes": 2 * kv_token_bytes * args.concurrency * (longest + KV_MARGIN),
    }  # fmt: skip
    chosen, scripts = kinds(args), Path(__file__).parent / "lib"
    found: dict[Kind, list[Answer]] = {kind: [] for kind in chosen}
    with ExitStack() as running, progress((1 + args.rounds) * len(chosen), "turns") as bar:
        peers: dict[Kind, Peer] = {}
        for kind in chosen:  # one after another: two that load or compile would disturb nobody but themselves
            own = environment(args.threads, kind.python)
            peer = Peer.of_file(kind.name, kind.python, scripts / kind.script, own)
            peers[kind] = running.enter_context(peer)
            versions = peer.ask({**first, "num_draft": kind.num_draft})["versions"]
            peer.ask({"prompts": prompts[: args.concurrency], "max_tokens": 4})
            found[kind].append({"versions": versions})
            bar.update()
        for _ in range(args.rounds):
            for kind, peer in peers.items():
                time.sleep(SETTLE_S)
                found[kind].append(peer.ask({"prompts": prompts, "max_tokens": args.max_tokens}))
                bar.update()
    return found


def bound_of(args: argparse.Namespace) -> StepBound:
    """Counted on a model without weights."""
    config = AutoConfig.from_pretrained(model_path(args.model))
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype_of(args))
    return StepBound(measured_rates(args.device, dtype_of(args)), ModelWork.of(module))


def summary(runs: Sequence[Answer], first: Sequence[Answer], plain_token_s: float) -> dict[str, Any]:
    """Medians over rounds, ratios round by round."""

    def tokens_per_s(run: Answer) -> float:
        return float(sum(map(len, run["token_ids"])) / run["seconds"])

    ratios = [tokens_per_s(a) / tokens_per_s(b) for a, b in zip(runs, first, strict=True)]
    texts, firsts = ([ids for run in some for ids in run["token_ids"]] for some in (runs, first))
    times = {name: [1e3 * value for run in runs for value in run[name]] for name in ("ttft", "tpot")}
    rate = statistics.median(map(tokens_per_s, runs))
    return {
        "tokens_per_s": rate, "ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios),
        **{f"{name}_p50_ms": percentile(values, 50) if values else None for name, values in times.items()},
        "mean_acceptance_length": runs[-1]["mean_acceptance_length"],
        "same": f"{sum(a == b for a, b in zip(texts, firsts, strict=True))}/{len(texts)}",
        "token_vs_plain_light": 1 / rate / plain_token_s,
    }  # fmt: skip


def run_command(args: argparse.Namespace) -> int:
    settle(args)
    if args.dtype == "auto":
        args.dtype = str(dtype_of(args)).removeprefix("torch.")  # the same for all
    torch.set_num_threads(args.threads)
    prompts, ends = encode(args)
    bound = bound_of(args)
    found = measure(args, prompts, bound.kv_token_bytes)
    runs = {kind: [cut(run, ends) for run in answers[1:]] for kind, answers in found.items()}
    first = next(iter(runs.values()))
    emitted = statistics.fmean(len(ids) for ids in first[0]["token_ids"])
    context = statistics.fmean(map(len, prompts)) + emitted / 2
    plain_token_s = bound.seconds(args.concurrency, 0, context) / args.concurrency
    output = Output("compare_peers", args, dtype_of(args), COLUMNS)
    output.heading()
    rates: dict[str, dict[str, float]] = {}
    for kind, mine in runs.items():
        result = summary(mine, first, plain_token_s)
        rates[kind.name] = {"tokens/s": result["tokens_per_s"]}
        config = {"peer": kind.name, "num_draft": kind.num_draft, "versions": found[kind][0]["versions"]}
        output.line(config, result)
    plot_bars(args.plot, f"{len(prompts)} prompts, {args.concurrency} at once", "output tokens per second", rates)
    return 0


def cut(run: Answer, ends: frozenset[int]) -> Answer:
    """Tokens up to the one that ends a text; engines differ in what they return behind it."""
    texts = run["token_ids"]
    kept = [ids[: next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))] for ids in texts]
    return {**run, "token_ids": kept}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--prompts-file", type=Path, default=BUILTIN_PROMPTS, help="text lines, or MT-bench jsonl")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=1, help="above 1 without prompt lookup, which serves one")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--peers", nargs="+", choices=("transformers", "vllm", "graphspec"), help="default: all")
    parser.add_argument("--vllm-python", help="a Python that has vLLM")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of every peer")
    parser.add_argument("--rounds", type=int, default=3)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("compare_peers", Command(__doc__, add_arguments, run_command), arguments)


if __name__ == "__main__":
    sys.exit(main())
