"""How `compare_peers.py` talks to a peer: JSON lines over the peer's stdin and stdout. Standard library only, since a
peer runs in the Python that has its engine.

    first line    {"model": folder, "dtype": name, "max_model_len": n, "concurrency": n, "num_draft": k,
                   "kv_bytes": enough for the KV cache}
    answer        {"versions": "..."}
    later lines   {"prompts": [[token id, ...], ...], "max_tokens": n}
    answers       {"seconds": s, "token_ids": [[...], ...], "ttft": [s, ...], "tpot": [s, ...],
                   "mean_acceptance_length": tokens per step, or null}
    on failure    {"error": "..."}
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

Request = dict[str, Any]
Answer = dict[str, Any]
Run = Callable[[Request], Answer]

PATIENCE_S = 20.0  # for a peer to end by itself


def answer(start: Callable[[Request], tuple[Run, str]]) -> None:
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


class Peer:
    """Our side of one peer in a process of its own. Use as a context manager."""

    def __init__(self, name: str, python: str, script: Path, environment: Mapping[str, str]) -> None:
        """Raises ValueError if there is no such Python."""
        self.name = name
        self._log = tempfile.NamedTemporaryFile("w")  # noqa: SIM115  (closed with the peer)
        try:
            self._process = subprocess.Popen(
                [python, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=dict(environment),
                text=True,
            )
        except OSError as caught:
            raise ValueError(f'cannot start "{python}" for {name}: {caught.strerror}') from caught

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
