"""The engine that subcommands look into, and the options that say which."""

from __future__ import annotations

import argparse

import torch

from graphs import GraphKey
from graphspec.commands.sampler_kinds import params_for
from graphspec.engine.engine import Engine
from graphspec.execution.iteration import DecodeInputs
from graphspec.models.builtin import NAME
from graphspec.records.config import EngineConfig
from graphspec.sampling.keyed_sampling import SAMPLERS


def add_draft_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-speculative-tokens", type=int, default=3, metavar="K", help="drafts per step")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """What chooses an engine and one of its graphs."""
    parser.add_argument("--model", default=NAME, help="built-in name, local Hugging Face folder, or hub id")
    parser.add_argument("--device", default="auto", help="cpu or cuda; default: cuda where there is one")
    parser.add_argument("--rows", type=int, default=2, help="rows of the graph to look at")
    parser.add_argument("--sampler", choices=SAMPLERS, default="greedy")
    add_draft_option(parser)
    add_json_option(parser)


def key_of(args: argparse.Namespace) -> GraphKey:
    k = args.num_speculative_tokens
    return GraphKey("decode", args.rows, k, k, args.sampler)


def running_engine(args: argparse.Namespace) -> Engine:
    """An engine with rows - 1 requests in the middle of their text, so that the graph has a padding row."""
    config = EngineConfig(
        num_speculative_tokens=args.num_speculative_tokens,
        max_num_seqs=args.rows,
        depth=0,
        max_model_len=256,
        num_pages=16 * args.rows,
        device=args.device,
        enforce_eager=True,
    )
    engine = Engine.from_pretrained(args.model, config)
    for i in range(max(1, args.rows - 1)):
        params = params_for(args.sampler, max_tokens=100, ignore_eos=True, seed=i)
        engine.add_request([10 + i, 20, 30, 40, 20, 30, 40], params)
    for _ in range(6):
        engine.step()
    return engine


def stage_running_rows(engine: Engine, key: GraphKey) -> int:
    """Put the running requests into the static inputs, as a launch would; returns how many."""
    step, table = engine._runner.decode_step, engine._scheduler.table
    slots = [slot for slot, request in enumerate(table.request) if request is not None][: key.rows]
    step.fill_with_padding()
    step.stage(DecodeInputs(torch.tensor(slots), torch.from_numpy(table.page_table[slots])))
    return len(slots)
