"""What the options of benchmarks have in common, and the models that they name."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer

from graphspec.commands.bench.plots import check_plot
from graphspec.engine.resolve import DTYPES, resolve_device
from graphspec.models.builtin import NAME
from graphspec.models.loading import load_module, model_path


def add_common(parser: argparse.ArgumentParser, *, model: bool = True) -> None:
    """The options that every benchmark of a device has, `--model` only for those that load one."""
    if model:
        parser.add_argument("--model", default=NAME, help="built-in name, local Hugging Face folder, or hub id")
    parser.add_argument("--device", default="auto", help="cpu or cuda; default: cuda where there is one")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="default: as the engine chooses")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="also draw it (needs matplotlib)")


def settle(args: argparse.Namespace) -> None:
    """Decide what the options leave open, before anything is measured. Raises ValueError, in one sentence, for a plot
    that cannot be written and a device that is not there."""
    check_plot(args.plot)
    args.device = resolve_device(args.device).type


def dtype_of(args: argparse.Namespace) -> torch.dtype:
    """The dtype of weights and KV; "auto" is what fits the device where no checkpoint says so."""
    return DTYPES.get(args.dtype, torch.float32 if args.device == "cpu" else torch.bfloat16)


def load(args: argparse.Namespace) -> nn.Module:
    """The model that the options name, as `Engine.from_pretrained` loads it."""
    dtype = DTYPES.get(args.dtype, torch.float32 if args.device == "cpu" else None)
    return load_module(args.model, dtype, torch.device(args.device))


def load_tokenizer(model: str) -> Any:
    return AutoTokenizer.from_pretrained(model_path(model))


def on_same_weights(module: nn.Module) -> nn.Module:
    """A copy of the module for an engine of its own that shares the weights, which nobody writes."""
    weights = {id(tensor): tensor for tensor in module.parameters()}
    return copy.deepcopy(module, weights)
