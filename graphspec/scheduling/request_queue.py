"""Requests that wait for a slot. No torch."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterator

from graphspec.records.request import Request


class RequestQueue(Collection[Request]):
    """Waiting requests by rank. The first one is admitted next, and no other overtakes it."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a new or a preempted request: its rank decides where, not when it came."""
        insort(self._requests, request, key=lambda waiting: waiting.rank)

    def first(self) -> Request:
        return self._requests[0]

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def __contains__(self, request: object) -> bool:
        return request in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)
