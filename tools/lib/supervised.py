"""Checks in a process that may die: a kernel that reads out of bounds takes the whole CUDA context with it, and one
that never ends takes the time. The process is then ended, what it was at is a failed line, and another one goes on."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from lib.gpu_report import Report

LOST = 3  # exit status of a worker whose device answers no more; what it was at is a line already
POLL_S, GRACE_S = 0.2, 5.0


def supervise(command: Sequence[str], report: Report, end: float, patience: float) -> None:
    """Run `command`, a worker that tries every check that has no line in `report` yet, until it ends by itself; at the
    latest until `end` (monotonic clock). A check may take `patience` seconds. SIGTERM is a KeyboardInterrupt inside."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _supervise(command, report, end, patience)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _supervise(command: Sequence[str], report: Report, end: float, patience: float) -> None:
    while True:
        before = len(report.rows())
        worker = subprocess.Popen(command)
        try:
            status, why = _watch(worker, report, end, patience)
        finally:
            worker.kill()  # if it still runs, because this process is to end
        running = report.running
        if running is not None:
            report.add(running, {"ok": False, "error": why, "stack": _stack(report.out)})
        elif status not in (0, LOST):
            report.add("checks", {"ok": False, "error": f"between two checks: {why}", "stack": _stack(report.out)})
        died = running is not None or status == LOST
        if not died or time.monotonic() >= end or len(report.rows()) == before:
            return


def _watch(worker: subprocess.Popen[bytes], report: Report, end: float, patience: float) -> tuple[int, str]:
    """Wait for the worker; end it if time is up or one check takes too long. Its exit status, and what happened."""
    current, since, why = report.running, time.monotonic(), ""
    while worker.poll() is None and not why:
        time.sleep(POLL_S)
        now = time.monotonic()
        if (running := report.running) != current:
            current, since = running, now
        if now >= end:
            why = "cut off: the time was up"
        elif current is not None and now - since > patience:
            why = f"no answer for {patience:.0f} s"
    if why:
        worker.send_signal(signal.SIGABRT)  # which makes it write down where it was
        try:
            worker.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            worker.kill()
    status = worker.wait()
    return status, why or (f"the process was ended by signal {-status}" if status < 0 else f"exit status {status}")


def _stack(out: Path) -> str:
    """What faulthandler wrote."""
    path = out / "stack.txt"
    return path.read_text(errors="replace")[:4000] if path.exists() else ""
