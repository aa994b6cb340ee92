"""The pool of KV pages and the prefix cache over it. Host bookkeeping only, no torch."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

PageHash = bytes


def page_hashes(root: PageHash, token_ids: Sequence[int], page_size: int) -> list[PageHash]:
    """One chained hash per full page of `token_ids`: it names the page's tokens and everything before them."""
    tokens = np.asarray(token_ids, np.int32)
    hashes, parent = [], root
    for start in range(0, len(tokens) - page_size + 1, page_size):
        content = tokens[start : start + page_size].tobytes()
        parent = hashlib.blake2b(parent + content, digest_size=16).digest()
        hashes.append(parent)
    return hashes


def salt_word(root: PageHash) -> int:
    """`root` of hash chains as a signed integer of 64 bits, for tables on the device."""
    return int.from_bytes(hashlib.blake2b(root, digest_size=8).digest(), "little", signed=True)


class PagePool:
    """Hands out page ids `0 .. num_pages - 1`; page `num_pages` is the scratch page and is never handed out.

    Every page is in exactly one of these states:

    free      holds nothing
    owned     `refs` > 0 running requests have it in their tables; full pages may be shared through their hash
    fenced    no owner, but a launch in flight may still touch it: back only when the newest such launch is answered
    cached    no owner, and its content is known by hash: reused by a request with the same prefix, or evicted, least
              recently used first, when free pages run out

    A page enters the hash table only if its content is certain: a full page of a prompt whose prefill was launched
    (launches run in order, so every later launch may read it), or of accepted output. Rejected drafts never do.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._refs = [0] * num_pages
        self._fence = [-1] * num_pages  # newest launch that may touch the page
        self._fenced: list[int] = []
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest use first
        self._page_of: dict[PageHash, int] = {}
        self._hash_of: dict[int, PageHash] = {}
        self._answered = -1
        self.generation = 0  # of the cache: counts resets

    @property
    def scratch_page(self) -> int:
        return self.num_pages

    @property
    def num_available(self) -> int:
        """Pages that `reserve` can hand out now: free, or cached and evictable."""
        return len(self._free) + len(self._cached)

    @property
    def num_fenced(self) -> int:
        """Pages that become available once launches in flight are answered."""
        return len(self._fenced)

    # Ownership.

    def reserve(self, count: int) -> list[int]:
        """Take `count` pages for one owner. The caller has checked `num_available`."""
        assert count <= self.num_available, "reserve more pages than are available"
        while len(self._free) < count:
            page, _ = self._cached.popitem(last=False)
            self._forget(page)
            self._free.append(page)
        cut = len(self._free) - count
        taken = self._free[cut:]
        del self._free[cut:]
        for page in taken:
            self._refs[page] = 1
        return taken

    def release(self, pages: Iterable[int], last_step: int) -> None:
        """One owner gives `pages` back; `last_step` is the newest launch that holds them in its table."""
        for page in pages:
            self._fence[page] = max(self._fence[page], last_step)
            self._refs[page] -= 1
            assert self._refs[page] >= 0, "page released more often than owned"
            if self._refs[page] == 0:
                if self._fence[page] > self._answered:
                    self._fenced.append(page)
                else:
                    self._retire(page)

    def answered(self, step: int) -> None:
        """Step `step`, and with it every step before it, has been answered."""
        self._answered = step
        if self._fenced:
            waiting = []
            for page in self._fenced:
                if self._fence[page] > step:
                    waiting.append(page)
                else:
                    self._retire(page)
            self._fenced = waiting

    def _retire(self, page: int) -> None:
        if page in self._hash_of:
            self._cached[page] = None
        else:
            self._free.append(page)

    # The prefix cache.

    def root(self, salt: str) -> PageHash:
        """The hash that chains start from: requests share pages only with an equal salt, and never across a reset."""
        return f"{self.generation}/{salt}".encode()

    def find(self, hashes: Iterable[PageHash]) -> list[int]:
        """Pages of the longest known prefix of a chain."""
        pages = []
        for page_hash in hashes:
            page = self._page_of.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_evictable(self, pages: Iterable[int]) -> int:
        """How many of `pages` are cached and without owner: available now, and no longer once they are shared."""
        return sum(page in self._cached for page in pages)

    def share(self, pages: list[int]) -> None:
        """Add an owner to pages that `find` returned."""
        for page in pages:
            if page in self._cached:
                del self._cached[page]
            elif self._refs[page] == 0:
                self._fenced.remove(page)
            self._refs[page] += 1

    def publish(self, pages: Sequence[int], hashes: Sequence[PageHash], start: int = 0) -> None:
        """Make the content of owned `pages[start:]` known under their hashes. A hash that is known keeps its page."""
        for page, page_hash in islice(zip(pages, hashes, strict=False), start, None):
            if page_hash not in self._page_of and page not in self._hash_of:
                self._page_of[page_hash] = page
                self._hash_of[page] = page_hash

    def withdraw(self, pages: Iterable[int]) -> None:
        """Forget the content of `pages`: it turned out to be wrong."""
        for page in pages:
            self._forget(page)
            if page in self._cached:
                del self._cached[page]
                self._free.append(page)

    def reset_cache(self) -> None:
        """Forget all content. Running requests keep their pages; nobody who comes later shares them."""
        self.generation += 1
        self._free.extend(self._cached)
        self._cached.clear()
        self._page_of.clear()
        self._hash_of.clear()

    def _forget(self, page: int) -> None:
        page_hash = self._hash_of.pop(page, None)
        if page_hash is not None:
            del self._page_of[page_hash]

    @property
    def num_known(self) -> int:
        """Pages whose content is known by hash."""
        return len(self._hash_of)

    def check(self, owned: Iterable[int]) -> None:
        """Assert every invariant; `owned` lists the pages of every running request, shared ones once per owner."""
        refs = Counter(owned)
        assert all(self._refs[page] == refs[page] for page in range(self.num_pages)), "references are not the owners"
        idle = Counter([*self._free, *self._fenced, *self._cached])
        assert set(idle) | set(refs) == set(range(self.num_pages)), "a page is lost, or an id outside the pool is used"
        assert not set(idle) & set(refs), "an owned page is also idle"
        assert all(count == 1 for count in idle.values()), "a page is idle twice"
        assert all(self._fence[page] > self._answered for page in self._fenced), "a fence outlived its answer"
        assert all(self._page_of[h] == page for page, h in self._hash_of.items()), "hash tables disagree"
        assert len(self._page_of) == len(self._hash_of)
        assert all(page in self._hash_of for page in self._cached), "a cached page without a hash"
        assert not any(page in self._hash_of for page in self._free), "a free page with a hash"
