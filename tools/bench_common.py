"""What benchmarks share: common options, the output (JSON lines or a table) and where it comes from, engines on one set
of weights."""

from __future__ import annotations

import argparse
import copy
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from bench_plot import check_plot
from torch import nn
from transformers import AutoTokenizer

from graphs.stream import release_openmp_team
from graphspec import Engine, SamplingParams
from graphspec.engine.resolve import DTYPES, resolve_device
from graphspec.models.builtin import NAME
from graphspec.models.loading import load_module, model_path
from graphspec.records.sampling_params import kind_parts
from graphspec.scheduling.slot_table import PREFILL

ROOT = Path(__file__).resolve().parent.parent


# Options.


def parser_for(doc: str | None, *, model: bool = True) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has, `--model` only for those that load one."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if model:
        parser.add_argument("--model", default=NAME, help="built-in name, local Hugging Face folder, or hub id")
    parser.add_argument("--device", default="auto", help="cpu or cuda; default: cuda where there is one")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="default: as the engine chooses")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--plot", type=Path, metavar="PNG", help='also draw it (needs matplotlib: the extra "bench")')
    return parser


def run(name: str, parser: argparse.ArgumentParser, work: Callable[[argparse.Namespace], None],
        arguments: Sequence[str] | None) -> None:  # fmt: skip
    """Parse and work. What a user can get wrong ends the program with one sentence and no traceback."""
    args = parser.parse_args(arguments)
    quiet_transformers()
    try:
        check_plot(args.plot)
        args.device = resolve_device(args.device).type
        work(args)
    except ValueError as error:
        raise SystemExit(f"{name}: {error}") from error


def quiet_transformers() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


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


# Output.


def commit() -> str:
    """The commit of this checkout, with "+" if files differ from it; "unknown" outside a checkout."""
    try:
        run = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def device_name(device: str) -> str:
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {torch.get_num_threads()} threads"


def provenance(device: str, dtype: torch.dtype | None) -> dict[str, str]:
    """Fields that go into every JSON line. The dtype is that of the weights; None where there are none."""
    name = "none" if dtype is None else str(dtype).removeprefix("torch.")
    return {"commit": commit(), "device": device_name(device), "dtype": name, "torch": torch.__version__}


class Output:
    """Lines of one benchmark on stdout: JSON, or cells of a table under `columns` (field -> heading)."""

    def __init__(self, tool: str, args: argparse.Namespace, dtype: torch.dtype, columns: Mapping[str, str]) -> None:
        self._tool, self._json, self._columns = tool, args.json, columns
        self._from = provenance(args.device, dtype)
        self._options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "plot"}
        self._width = {field: max(9, len(heading)) for field, heading in columns.items()}
        if not args.json:
            self.text(", ".join(self._from.values()))

    def heading(self) -> None:
        self.text("  ".join(heading.rjust(self._width[field]) for field, heading in self._columns.items()))

    def table(self, lines: Sequence[str], results: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
        """Results (config, values) that human readers see as `lines`."""
        self.text("\n".join(lines))
        if self._json:
            for config, values in results:
                self.line(config, values)

    def line(self, config: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        if self._json:
            whole = {"tool": self._tool, **self._from, "config": {**self._options, **config}, **values}
            print(json.dumps(whole), flush=True)
            return
        found = {**config, **values}
        self.text("  ".join(cell(found[field]).rjust(self._width[field]) for field in self._columns))

    def text(self, line: str = "") -> None:
        """A line for human readers."""
        if not self._json:
            print(line, flush=True)


def cell(value: Any) -> str:
    """A value as a table shows it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def side_by_side(names: Sequence[str], columns: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of a table with one column per variant and one row per value."""
    texts = {key: [cell(column[key]) for column in columns] for key in columns[0]}
    width = 2 + max(10, *(len(text) for row in (names, *texts.values()) for text in row))
    lines = [" " * 30 + "".join(name.rjust(width) for name in names)]
    return lines + [f"{key:<30}" + "".join(text.rjust(width) for text in row) for key, row in texts.items()]


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that `percent` of the values do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else 0.0


def progress(total: int, what: str) -> Any:
    """A bar on stderr for long runs, where somebody watches."""
    from tqdm import tqdm

    return tqdm(total=total, desc=what, file=sys.stderr, disable=not sys.stderr.isatty(), leave=False)


# Load.


def rest(engine: Engine) -> None:
    """At the end of a turn: an engine that waits while others are measured keeps no OpenMP threads. Those of all count,
    and with more of them than cores every parallel region sleeps at its barriers, see `release_openmp_team`."""
    engine._runner.on_stream(release_openmp_team)


def params_for(sampler: str, **common: Any) -> SamplingParams:
    """Parameters of a request that needs exactly this kind of sampler."""
    kind = kind_parts(sampler)
    own: dict[str, Any] = {
        "greedy": {},
        "plain": {"temperature": 0.8},
        "bounded": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
        "sorted": {"temperature": 0.8, "top_p": 0.95},
    }[kind.base]
    if kind.processors:
        own |= {"repetition_penalty": 1.1, "presence_penalty": 0.2, "bad_words_ids": [[17, 18], [19]]}
    if kind.logprobs:
        own |= {"logprobs": 5}
    return SamplingParams(**common, **own)


def step_until_all_decode(engine: Engine) -> None:
    """Until no request waits or has prompt left to compute."""
    while engine._scheduler.waiting or (engine._scheduler.table.phase == PREFILL).any():
        engine.step()
