"""torch.compile settings in one place."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from graphs.capture import BakedValue, Output

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


class CompiledProgram:
    """A function that is compiled inside, run as it is: the CPU's graph with compilation. Dynamo's guards stand where a
    record would bake."""

    baked: tuple[BakedValue, ...] = ()
    pool_bytes = 0
    num_ops: int | None = None

    def __init__(self, fn: Callable[[], Output]) -> None:
        self.run = fn


def keep_compiled(fn: Callable[[], Output]) -> tuple[CompiledProgram, Output]:
    """The CPU backend of `graphs.capture` for functions that call compiled code. Runs `fn` twice to warm it up."""
    with torch.no_grad():
        fn()
        return CompiledProgram(fn), fn()


def compile_static(fn: Callable[P, R]) -> Callable[P, R]:
    """`fn` compiled for fixed shapes as one region; a graph break is an error, never a silent slow path.

    Inductor's own CUDA graphs stay off: what is captured, and when, is decided by this package.
    """
    return torch.compile(fn, fullgraph=True, dynamic=False, options={"triton.cudagraphs": False})
