"""What every benchmark line carries: commit, device, versions."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import torch

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
