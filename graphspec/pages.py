"""The pool of KV pages. Host bookkeeping only, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class PagePool:
    """Hands out page ids `0 .. num_pages - 1`; page `num_pages` is the scratch page and is never handed out.

    Pages come back *behind a fence*: a launch in flight may still write to the pages of a request that has ended, so
    they are free again only when the newest launch that could touch them has been answered.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._fenced: list[tuple[int, list[int]]] = []  # (step, pages)
        self._answered = -1

    @property
    def scratch_page(self) -> int:
        return self.num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_fenced(self) -> int:
        """Pages that will be free once launches in flight are answered."""
        return sum(len(pages) for _, pages in self._fenced)

    def reserve(self, count: int) -> list[int]:
        """Take `count` pages. The caller has checked `num_free`."""
        assert count <= len(self._free), "reserve more pages than are free"
        cut = len(self._free) - count
        taken = self._free[cut:]
        del self._free[cut:]
        return taken

    def release(self, pages: list[int], last_step: int) -> None:
        """Give `pages` back once step `last_step`, the newest launch that may write to them, is answered."""
        if not pages:
            return
        if last_step <= self._answered:
            self._free.extend(pages)
        else:
            self._fenced.append((last_step, pages))

    def answered(self, step: int) -> None:
        """Step `step`, and with it every step before it, has been answered."""
        self._answered = step
        for _, pages in (entry for entry in self._fenced if entry[0] <= step):
            self._free.extend(pages)
        self._fenced = [entry for entry in self._fenced if entry[0] > step]

    def check(self, owned: Iterable[int]) -> None:
        """Assert that every page is exactly one of free, fenced, or owned by one running request."""
        fenced = (page for _, pages in self._fenced for page in pages)
        seen = Counter([*self._free, *fenced, *owned])
        assert set(seen) == set(range(self.num_pages)), "a page is lost, or an id outside the pool is in use"
        assert all(count == 1 for count in seen.values()), "a page has two owners"
        assert all(step > self._answered for step, _ in self._fenced), "a fence outlived its answer"
