"""Measure attention of one layer alone: time against true lengths, rows and 1 + k, per backend.

    graphspec bench attention --lengths 64 512 4096 --capacity 8192 --rows 1 8 --num-draft 0 3
    graphspec bench attention --backends reference flashinfer_xqa flashinfer_fa2 --plot attention.png

Every time is that of a replay of one captured graph per backend, rows and k, which serves all lengths; backends and
lengths take turns, so that drift of the machine meets all of them alike. Cost has to follow `lengths`, not `capacity`,
the tokens that the block tables could hold. `x light` is the time over that of reading the K and V of the true lengths
at the bandwidth of the memory, or of the two products at the machine's matrix rate, whichever is later; what fits into
a cache may be faster than that.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

from attention import AttentionShape, AttentionSpec, create_backend
from graphspec.commands.bench.attention_step import AttentionStep
from graphspec.commands.bench.options import add_common, dtype_of, settle
from graphspec.commands.bench.output import Output, progress
from graphspec.commands.bench.plots import plot_lines
from graphspec.commands.bench.speed_of_light import Rates, Work, measured_rates, seconds_of
from graphspec.commands.command import Command

COLUMNS = {
    "backend": "backend", "rows": "rows", "num_draft": "k", "length": "length", "us": "us", "us_p90": "p90 us",
    "vs_first": "x first", "gb_per_s": "KV GB/s", "light_us": "bound us", "vs_light": "x light",
}  # fmt: skip


def shape_of(args: argparse.Namespace) -> AttentionShape:
    spec = AttentionSpec(args.head_dim**-0.5)
    width = -(-args.capacity // args.page_size)
    device = torch.device(args.device)
    return AttentionShape(
        args.heads, args.kv_heads, args.head_dim, args.page_size, width, dtype_of(args), device, (spec,)
    )


def attention_work(shape: AttentionShape, rows: int, query_len: int, length: int) -> Work:
    """What attention over `length` tokens per row must move and compute."""
    pairs = rows * query_len * (length - (query_len - 1) / 2)
    kv = 2 * rows * length * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
    return Work(kv_bytes=kv, operations=int(4 * shape.num_heads * shape.head_dim * pairs))


def measure(args: argparse.Namespace, shape: AttentionShape, rows: int, query_len: int) -> dict[tuple[str, int], Any]:
    """(backend, length) -> seconds of its replays, for every backend and length in turns."""
    steps = {name: AttentionStep(shape, create_backend(name, shape), rows, query_len) for name in args.backends}
    taken: dict[tuple[str, int], list[float]] = {(name, length): [] for length in args.lengths for name in steps}
    warm_ups = 2
    for turn in range(warm_ups + args.repeats):
        for name, length in taken:
            steps[name].set_lengths(torch.full((rows,), length))
            seconds = seconds_of(steps[name].graph.replay, shape.device, 1)
            if turn >= warm_ups:
                taken[name, length].append(seconds)
    return taken


def line_of(
    shape: AttentionShape, rates: Rates, rows: int, query_len: int, length: int, times: list[float], first: list[float]
) -> dict[str, float]:
    """The fields of one line; `first` are the times of the first backend at this length."""
    seconds, needed = statistics.median(times), attention_work(shape, rows, query_len, length)
    light = rates.seconds(needed)
    return {
        "us": 1e6 * seconds, "us_p90": 1e6 * statistics.quantiles(times, n=10)[8],
        "vs_first": statistics.median(a / b for a, b in zip(times, first, strict=True)),
        "gb_per_s": needed.kv_bytes / seconds / 1e9, "light_us": 1e6 * light, "vs_light": seconds / light,
    }  # fmt: skip


def run_command(args: argparse.Namespace) -> int:
    settle(args)
    longest, shortest = max(args.lengths), min(args.lengths)
    if longest > args.capacity or shortest <= max(args.num_draft):
        raise ValueError(f"lengths must lie between 1 + num-draft and the capacity of {args.capacity}")
    shape, rates = shape_of(args), measured_rates(args.device, dtype_of(args))
    for name in args.backends:
        create_backend(name, shape)  # an unknown one is refused before anything is measured
    output = Output("bench_attention", args, shape.dtype, COLUMNS)
    output.heading()
    series: dict[str, list[tuple[float, float]]] = {}
    bounds: dict[str, list[tuple[float, float]]] = {}
    cases = [(rows, k) for rows in args.rows for k in args.num_draft]
    with torch.no_grad(), progress(len(cases), "shapes") as bar:
        for rows, k in cases:
            taken = measure(args, shape, rows, 1 + k)
            for (name, length), times in taken.items():
                found = line_of(shape, rates, rows, 1 + k, length, times, taken[args.backends[0], length])
                output.line({"backend": name, "rows": rows, "num_draft": k, "length": length}, found)
                label = f"{name}, {rows} x {1 + k}"
                series.setdefault(label, []).append((length, found["us"]))
                bounds.setdefault(label, []).append((length, found["light_us"]))
            bar.update()
    plot_lines(args.plot, "Attention of one layer, and its bound (dashed)", "tokens per row", "us", series, bounds)
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `graphspec bench attention` takes."""
    add_common(parser, model=False)
    parser.add_argument("--backends", nargs="+", default=["reference"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--capacity", type=int, default=8192, help="tokens a row's block table holds")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-draft", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=20, help="replays of each, at least 2")


COMMAND = Command(__doc__, add_arguments, run_command)
