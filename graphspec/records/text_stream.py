"""Text of a growing list of token ids: incremental detokenisation and stop strings. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"


class TextStream:
    """Incremental detokenisation that never emits half a character, nor text that may be the start of a stop string.

    Only a short tail is decoded again per call: from `_prefix`, far enough back to see how tokens join, the text up to
    `_read` is known, and `_ahead` characters behind it. A replacement character at the end waits for the bytes that
    complete it. Works with any tokenizer that has `decode` (after the scheme of Hugging Face's
    text-generation-inference).
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), include_stop: bool = False) -> None:
        self._tokenizer = tokenizer
        self._stop, self._include_stop = tuple(stop), include_stop
        self._ids: list[int] = []
        self._prefix = self._read = self._ahead = self._emitted = 0
        self.text = ""
        self.stopped = False  # a stop string was found; `text` ends there

    def accept(self, token_ids: list[int], skip: int = 0) -> int:
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

    def take(self, *, final: bool) -> str:
        """The text that became certain since the last call; `final` takes whatever is left."""
        if final and not self.stopped:
            self._feed([], final=True)
        end = len(self.text) if final or self.stopped else len(self.text) - self._held_back()
        piece = self.text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return piece

    def push(self, token_ids: list[int], *, final: bool) -> str:
        """`accept` and `take` in one call."""
        self.accept(token_ids)
        return self.take(final=final)

    def _feed(self, token_ids: list[int], *, final: bool) -> None:
        self._ids += token_ids
        before = self._decode(self._ids[self._prefix : self._read])
        now = self._decode(self._ids[self._prefix :])
        certain = now if final else now.rstrip(REPLACEMENT)
        self.text += certain[len(before) + self._ahead :]
        self._ahead = max(self._ahead, len(certain) - len(before))
        if certain == now and len(now) > len(before):
            self._prefix, self._read, self._ahead = self._read, len(self._ids), 0

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
