"""torch.compile settings in one place."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def check_compiler(device: torch.device) -> None:
    """Raise RuntimeError, in one sentence, if Inductor could not build code for `device` on this machine."""
    if device.type != "cpu":
        return
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise RuntimeError("compile=True needs a C++ compiler: install g++ (Debian: apt install g++) or drop compile")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise RuntimeError(f"compile=True needs the Python headers ({header}): install python3-dev or drop compile")


def compile_static(fn: Callable[P, R]) -> Callable[P, R]:
    """`fn` compiled for fixed shapes as one region; a graph break is an error, never a silent slow path.

    Inductor's own CUDA graphs stay off: what is captured, and when, is decided by this package.
    """
    return torch.compile(fn, fullgraph=True, dynamic=False, options={"triton.cudagraphs": False})
