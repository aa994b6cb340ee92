"""Processes that are measured beside each other: JSON lines over a peer's stdin and stdout.

A peer is a Python file with a function `start`. It is run by this file, which imports the standard library only, so a
peer may live in a Python that has its engine and not this package. What the peers of `tools/compare_peers.py` say:

    first line    {"model": folder, "dtype": name, "max_model_len": n, "concurrency": n, "num_draft": k,
                   "kv_bytes": enough for the KV cache}
    answer        {"versions": "..."}
    later lines   {"prompts": [[token id, ...], ...], "max_tokens": n}
    answers       {"seconds": s, "token_ids": [[...], ...], "ttft": [s, ...], "tpot": [s, ...],
                   "mean_acceptance_length": tokens per step, or null}
    on failure    {"error": "..."}
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

Request = dict[str, Any]
Answer = dict[str, Any]
Run = Callable[[Request], Answer]
Start = Callable[[Request], tuple[Run, str]]

PATIENCE_S = 20.0  # for a peer to end by itself


def answer(start: Start) -> None:
    """The peer's side: `start` takes the first line and returns what takes the later ones, and its versions. What
    libraries print goes to stderr."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    run: Run | None = None
    for line in sys.stdin:
        try:
            if run is None:
                run, versions = start(json.loads(line))
                reply: Answer = {"versions": versions}
            else:
                reply = run(json.loads(line))
        except Exception as caught:
            reply = {"error": f"{type(caught).__name__}: {caught}".splitlines()[0]}
        out.write(json.dumps(reply) + "\n")
        out.flush()


def start_file(path: Path) -> Start:
    """`start` of the peer in a file, which is imported with the first request: what it prints is no answer."""

    def start(first: Request) -> tuple[Run, str]:
        # As if Python had been started with that file. Modules beside this one would hide packages of the same name.
        here = str(Path(__file__).parent)
        sys.path[:] = [str(path.parent), *(entry for entry in sys.path if entry != here)]
        found: tuple[Run, str] = importlib.import_module(path.stem).start(first)
        return found

    return start


class Peer:
    """Our side of one peer in a process of its own. Use as a context manager."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Raises ValueError if there is no such program."""
        self.name = name
        self._log = tempfile.NamedTemporaryFile("w")  # noqa: SIM115  (closed with the peer)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=dict(environment),
                text=True,
            )
        except OSError as caught:
            raise ValueError(f'cannot start "{command[0]}" for {name}: {caught.strerror}') from caught

    @staticmethod
    def of_file(name: str, python: str, path: Path, environment: Mapping[str, str]) -> Peer:
        """The peer in the file `path`, run by `python`."""
        return Peer(name, [python, str(Path(__file__).resolve()), str(path.resolve())], environment)

    def ask(self, request: Request) -> Answer:
        """Raises ValueError, in one sentence, if the peer fails."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        reply: Answer = json.loads(line) if line else {"error": "it ended"}
        if "error" in reply:
            raise ValueError(f"{self.name} failed: {reply['error']}{self._cause()}")
        return reply

    def _cause(self) -> str:
        """The first error that it printed, which may be that of a process of its own; "" if none."""
        printed = Path(self._log.name).read_text(errors="replace").splitlines()
        errors = (found[0] for line in printed if (found := re.search(r"\w*Error: .*", line)))
        return "".join(f" ({error})" for error in islice(errors, 1))

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(PATIENCE_S)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


if __name__ == "__main__":
    answer(start_file(Path(sys.argv[1])))
