"""Reports a launch that does not come back. No torch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("graphspec")


class Watchdog:
    """Logs an error, with a report of the engine's state, when one wait lasts longer than `seconds`; again for every
    further period. The wait itself goes on: what to do about a stuck device is the operator's decision."""

    def __init__(self, seconds: float, report: Callable[[], str]) -> None:
        self._seconds, self._report = seconds, report
        self._waiting_since: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="graphspec-watchdog", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        self._waiting_since = time.monotonic()

    def __exit__(self, *exc_info: object) -> None:
        self._waiting_since = None

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._seconds / 4):
            since = self._waiting_since
            if since is not None and (waited := time.monotonic() - since) > self._seconds:
                logger.error("a launch has not come back for %.0f s: %s", waited, self._report())
                if self._waiting_since == since:
                    self._waiting_since = time.monotonic()
