"""What every benchmark line carries: commit, device, versions."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from graphspec import Engine, SamplingParams
from graphspec.request import kind_parts
from graphspec.slots import PREFILL

ROOT = Path(__file__).resolve().parent.parent


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


def provenance(device: str) -> dict[str, str]:
    """Fields that go into every JSON line."""
    return {"commit": commit(), "device": device_name(device), "torch": torch.__version__}


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
