"""Builds `paged_attention.cpp` with the machine's own compiler, on first use, and loads it.

The library lies in the user's cache under a name that stands for all that went into it: source, flags, and what the
compiler says of itself and of this processor, because machines share home directories. It appears in one rename, so
processes may build it at once.

Its OpenMP is the one that torch has loaded: it is linked to none, and what that leaves open is found in the process. A
second runtime would bring a second pool of threads, which spin in the way of torch's. A compiler whose OpenMP is not
torch's builds without, for one thread.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("paged_attention.cpp")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fPIC")
CHOICES = (("-march=native", "-fopenmp"), ("-march=native",), ())  # the first that works
LINK = ("-shared", "-undefined", "dynamic_lookup") if sys.platform == "darwin" else ("-shared",)

log = logging.getLogger(__name__)


class NoNativeError(RuntimeError):
    """Why there is no native kernel, in one sentence."""


def native_library() -> ctypes.CDLL:
    """The library of this process, built if this machine has not built it before. Raises NoNativeError."""
    found = _library_or_reason()
    if isinstance(found, str):
        raise NoNativeError(found)
    return found


@functools.cache
def _library_or_reason() -> ctypes.CDLL | str:
    try:
        return load(find_compiler(), cache_dir())
    except NoNativeError as error:
        log.info("attention on the CPU runs on torch: %s", error)
        return str(error)


def find_compiler() -> list[str]:
    """The command of a C++ compiler: `CXX`, or the first that is installed."""
    if named := os.environ.get("CXX"):
        return shlex.split(named)
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise NoNativeError(f"no C++ compiler was found: set CXX or install one of {', '.join(COMPILERS)}")


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "graphspec"


def load(compiler: Sequence[str], folder: Path) -> ctypes.CDLL:
    """Build the source with `compiler` unless `folder` has the result, and load it. Raises NoNativeError."""
    reason = ""
    for choice in CHOICES:
        try:
            library = ctypes.CDLL(str(_built([*compiler, *FLAGS, *choice], compiler, folder)))
        except subprocess.CalledProcessError as error:
            said = error.stderr.strip().splitlines()
            reason = f"{shlex.join(compiler)} failed: {said[0] if said else f'exit status {error.returncode}'}"
        except OSError as error:
            reason = f"{shlex.join(compiler)}: {error}"
        else:
            library.paged_attention.argtypes, library.paged_attention.restype = (ctypes.c_char_p,), None
            return library
    raise NoNativeError(reason)


def _built(compile_with: Sequence[str], link_with: Sequence[str], folder: Path) -> Path:
    macros = _run(*compile_with, "-dM", "-E", "-x", "c++", os.devnull)  # its version and the processor's features
    parts = (SOURCE.read_text(encoding="utf-8"), shlex.join([*compile_with, *LINK]), macros)
    library = folder / f"paged_attention-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".paged_attention-") as scratch:
            compiled, linked = f"{scratch}/compiled.o", f"{scratch}/linked.so"
            _run(*compile_with, "-c", str(SOURCE), "-o", compiled)
            _run(*link_with, *LINK, compiled, "-o", linked)
            os.replace(linked, library)
    return library


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
