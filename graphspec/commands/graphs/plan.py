"""Show which batch size uses which graph, and what padding costs, before anything is served.

graphspec graphs plan --max-num-seqs 16 --num-speculative-tokens 3
graphspec graphs plan --attention 32 8 128        which attention backend FlashInfer gives each of them
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass

import torch

from attention import AttentionShape, AttentionSpec, ChoiceTable, Machine, read_lines
from graphs import GraphPlan
from graphs.debug import BatchSize, batch_sizes
from graphspec.commands.command import Command
from graphspec.commands.graphs.running_engine import add_draft_option, add_json_option
from graphspec.execution.runner import decode_buckets, graph_plan
from graphspec.records.config import EngineConfig, halving_tiers


@dataclass(frozen=True)
class Plan:
    """The graphs that an engine with these options has."""

    resolved: GraphPlan
    num_drafts: tuple[int, ...]  # every k
    sizes: list[BatchSize]
    attention: str | None  # which backend serves which bucket, in words


def plan_of(args: argparse.Namespace) -> Plan:
    """Every batch size with its graph and its padding rows. Raises ValueError for rows that cannot be a ladder."""
    k = args.num_speculative_tokens
    rows = None if args.graph_rows is None else tuple(args.graph_rows)
    user = EngineConfig(max_num_seqs=args.max_num_seqs, num_speculative_tokens=k, graph_rows=rows)
    tiers = halving_tiers(k) if args.adaptive_speculation else (k,)
    resolved = graph_plan(user, tiers, drafts_ahead=True)
    attention = attention_plan(args, resolved) if args.attention else None
    return Plan(resolved, tiers, batch_sizes(resolved.ladder, args.max_num_seqs, 1 + k), attention)


def attention_plan(args: argparse.Namespace, resolved: GraphPlan) -> str:
    """Which FlashInfer backend serves which bucket, and why: on this GPU, or without one on an H100 or H200."""
    present = torch.cuda.is_available()
    machine = Machine.of(torch.device("cuda")) if present else Machine(capability=(9, 0), num_sms=132)
    heads, kv_heads, head_dim = args.attention
    spec = AttentionSpec(head_dim**-0.5)
    page_size, longest = 16, 8192
    shape = AttentionShape(
        heads, kv_heads, head_dim, page_size, longest // page_size, torch.bfloat16, torch.device("cuda"), (spec,)
    )
    return ChoiceTable(shape, machine, read_lines(args.attention_table)).describe(decode_buckets(resolved))


def run_command(args: argparse.Namespace) -> int:
    plan = plan_of(args)
    keys, samplers = plan.resolved.all_keys(), plan.resolved.samplers
    if args.json:
        found = {
            "keys": [key._asdict() for key in keys], "samplers": samplers, "num_drafts": plan.num_drafts,
            "sizes": [dataclasses.asdict(size) for size in plan.sizes],
        }  # fmt: skip
        print(json.dumps(found | ({"attention": plan.attention} if plan.attention else {})))
        return 0
    rows = len({key.rows for key in keys})
    print(f"{len(keys)} graphs: {rows} row counts x {len(plan.num_drafts)} k x {len(samplers)} samplers")
    print(f"k: {', '.join(map(str, plan.num_drafts))}\nsamplers: {', '.join(samplers)}\n")
    print(f"{'batch':>6} {'graph rows':>11} {'positions':>10} {'padding':>8}")
    for size in plan.sizes:
        bar = "#" * round(20 * size.padding)
        print(f"{size.batch:>6} {size.rows:>11} {size.positions:>10} {100 * size.padding:>6.0f} % {bar}")
    if plan.attention:
        print(f"\n{plan.attention}")
    return 0


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """What shapes the ladder of graphs."""
    add = parser.add_argument
    add("--max-num-seqs", type=int, default=16, help="the largest batch")
    add("--adaptive-speculation", action="store_true", help="plan for every k that may be chosen, up to the most")
    add("--graph-rows", type=int, nargs="+", help="plan with row counts of your own in place of the default")
    add("--attention", type=int, nargs=3, metavar=("HEADS", "KV_HEADS", "HEAD_DIM"),
        help="also the FlashInfer backend of every bucket, for bfloat16 heads")  # fmt: skip
    add("--attention-table", help="measurements that overrule the choice of backends")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `graphspec graphs plan` takes."""
    add_plan_options(parser)
    add_draft_option(parser)
    add_json_option(parser)


COMMAND = Command(__doc__, add_arguments, run_command)
