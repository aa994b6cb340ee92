"""Time of the attention op of one layer against the true lengths, on the torch reference or a FlashInfer backend.

    python tools/bench_attention.py --lengths 64 512 4096 --capacity 8192 --rows 1 8 --num-draft 3

Cost has to follow `lengths`, not `capacity`, the tokens that the block tables could hold. Medians, one JSON line each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from bench_common import provenance

from attention import AttentionShape, AttentionSpec, AttnInputs, Bucket, KVLayout, allocate_kv_cache, create_backend

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32 on the CPU, bfloat16 on a GPU")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--capacity", type=int, default=8192, help="tokens a row's block table holds")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-draft", type=int, default=3)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=20)
    return parser.parse_args(arguments)


def shape_of(args: argparse.Namespace) -> AttentionShape:
    device = torch.device(args.device)
    dtype = DTYPES[args.dtype or ("float32" if device.type == "cpu" else "bfloat16")]
    spec = AttentionSpec(args.head_dim**-0.5)
    width = -(-args.capacity // args.page_size)
    return AttentionShape(args.heads, args.kv_heads, args.head_dim, args.page_size, width, dtype, device, (spec,))


def measure(args: argparse.Namespace, shape: AttentionShape, rows: int) -> list[tuple[int, float]]:
    """(length, seconds) for every length; one backend, planned once, serves them all."""
    query_len, device, width = 1 + args.num_draft, shape.device, shape.table_width
    tables = torch.randperm(rows * width, device=device).view(rows, width).to(torch.int32)
    layout = KVLayout(1, rows * width, shape.page_size, shape.num_kv_heads, shape.head_dim, shape.dtype)
    cache = allocate_kv_cache(layout, device)[0].normal_()
    backend = create_backend(args.backend, shape)
    backend.plan([Bucket(rows, query_len)], tables)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device) * query_len
    query = torch.randn(rows, shape.num_heads, query_len, shape.head_dim, dtype=shape.dtype, device=device)
    new = torch.randn(rows, shape.num_kv_heads, query_len, shape.head_dim, dtype=shape.dtype, device=device)

    def step(length: int) -> float:
        lens = torch.full((rows,), length, dtype=torch.int32, device=device)
        places = torch.arange(length - query_len, length, device=device)
        slots = tables[:, places // shape.page_size].long() * shape.page_size + places % shape.page_size
        inputs = AttnInputs(tables, lens, starts, slots.flatten(), query_len)
        backend.prepare(inputs)
        synchronize(device)
        started = time.perf_counter()
        backend.attend(query, new, new, cache, inputs, shape.specs[0])
        synchronize(device)
        return time.perf_counter() - started

    times: dict[int, list[float]] = {length: [] for length in args.lengths}
    for _ in range(2 + args.repeats):  # lengths take turns, so that drift of the machine meets all alike
        for length in args.lengths:
            times[length].append(step(length))
    return [(length, statistics.median(taken[2:])) for length, taken in times.items()]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    longest, shortest = max(args.lengths), min(args.lengths)
    if longest > args.capacity or shortest <= args.num_draft:
        raise SystemExit(f"lengths must lie between 1 + num-draft and the capacity of {args.capacity}")
    with torch.no_grad():
        for rows in args.rows:
            for length, seconds in measure(args, shape_of(args), rows):
                config = {"backend": args.backend, "rows": rows, "num_draft": args.num_draft, "length": length}
                line = {"tool": "bench_attention", **provenance(args.device), "config": config, "seconds": seconds}
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
