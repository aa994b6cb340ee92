"""graphspec as a peer of `compare_peers.py`: n-gram drafts, one step ahead, everything else as it comes."""

from __future__ import annotations

import torch

from graphspec import Engine, EngineConfig, SamplingParams
from graphspec.commands.bench.peer import Answer, Request, Run
from graphspec.commands.bench.serving_load import capture_graphs, serve
from graphspec.commands.command import quiet_transformers
from graphspec.commands.provenance import commit
from graphspec.engine.resolve import DTYPES, resolve_device
from graphspec.models.loading import load_module


def start(first: Request) -> tuple[Run, str]:
    quiet_transformers()
    module = load_module(first["model"], DTYPES[first["dtype"]], resolve_device("auto"))
    k = first["num_draft"]
    config = EngineConfig(
        num_speculative_tokens=k, max_num_seqs=first["concurrency"], max_model_len=first["max_model_len"]
    )
    engine = Engine(module, config=config)
    capture_graphs(engine, "greedy")

    def run(request: Request) -> Answer:
        params = SamplingParams(max_tokens=request["max_tokens"])
        served = serve(engine, request["prompts"], params, first["concurrency"])
        drafts = served.counts["num_drafts"]
        return {
            "seconds": served.seconds,
            "token_ids": served.token_ids,
            "ttft": served.ttft,
            "tpot": served.tpot,
            "mean_acceptance_length": 1 + served.counts["num_accepted_tokens"] / drafts if drafts else 1.0,
        }

    return run, f"graphspec {commit()}, torch {torch.__version__}"
