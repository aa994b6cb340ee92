"""Which code, on which machine: what `graphspec --version` prints and every line of a benchmark carries."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path

import torch
import transformers

from graphspec.engine.resolve import resolve_device


def version_of(distribution: str) -> str:
    """The version of an installed distribution, "none" where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def commit() -> str:
    """The commit of the checkout that this code runs from, with "+" if files differ from it; outside a checkout the
    version."""
    here = Path(__file__).resolve()
    git = ["git", "-C", str(here.parent)]
    try:
        # An environment inside some checkout is none of its files: this file must be one of them.
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], capture_output=True, check=True)
        described = [*git, "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return version_of("graphspec")


def device_name(device: str) -> str:
    """The model of the GPU, or that of the processor and how many threads torch uses of it."""
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


def versions() -> dict[str, str]:
    """What somebody who reports a problem should name. Loads no model."""
    device = resolve_device("auto").type
    return {
        "graphspec": version_of("graphspec"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "FlashInfer": version_of("flashinfer-python"),
        "device": f"{device}: {device_name(device)}",
    }
