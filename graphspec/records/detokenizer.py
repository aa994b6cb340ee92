"""Text of a growing list of token ids, and the stop strings in it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Never emits half a character, nor text that may be the start of a stop string. Works with any tokenizer that has
    `decode`.

    Only a short tail is decoded again per call, as Hugging Face's text-generation-inference does it. The tail begins at
    the id `_prefix_offset`, far enough back to see how tokens join. `text` covers the ids before `_read_offset` and
    `_ahead` characters of those after it: a replacement character at the end may be half a character, and waits.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), include_stop: bool = False) -> None:
        self._tokenizer = tokenizer
        self._stop, self._include_stop = tuple(stop), include_stop
        self._ids: list[int] = []
        self._prefix_offset = self._read_offset = self._ahead = self._emitted = 0
        self.text = ""
        self.stopped = False  # a stop string was found; `text` ends there

    def update(self, token_ids: list[int], skip: int = 0) -> int:
        """Append `token_ids` and return how many count: up to and including the one that completes a stop string.

        Stop strings completed by the first `skip` tokens are ignored.
        """
        if not self._stop:
            self._feed(token_ids, final=False)
            return len(token_ids)
        for count, token in enumerate(token_ids, start=1):
            before = len(self.text)
            self._feed([token], final=False)
            if count > skip and self._cut(before):
                return count
        return len(token_ids)

    def take_text(self, *, final: bool) -> str:
        """The text that became certain since the last call; `final` takes whatever is left."""
        if final and not self.stopped:
            self._feed([], final=True)
        end = len(self.text) if final or self.stopped else len(self.text) - self._held_back()
        piece = self.text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return piece

    def _feed(self, token_ids: list[int], *, final: bool) -> None:
        self._ids += token_ids
        before = self._decode(self._ids[self._prefix_offset : self._read_offset])
        now = self._decode(self._ids[self._prefix_offset :])
        certain = now if final else now.rstrip(REPLACEMENT)
        self.text += certain[len(before) + self._ahead :]
        self._ahead = max(self._ahead, len(certain) - len(before))
        if certain == now and len(now) > len(before):
            self._prefix_offset, self._read_offset, self._ahead = self._read_offset, len(self._ids), 0

    def _cut(self, before: int) -> bool:
        """End the text at the first stop string that reaches past its length `before`."""
        found = [(at, s) for s in self._stop if (at := self.text.find(s, max(0, before - len(s) + 1))) >= 0]
        if found:
            at, stop = min(found)
            self.text = self.text[: at + len(stop) if self._include_stop else at]
            self.stopped = True
        return self.stopped

    def _held_back(self) -> int:
        """Length of the longest end of the text that a stop string starts with."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            if any(s.startswith(self.text[-length:]) for s in self._stop):
                return length
        return 0

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text
