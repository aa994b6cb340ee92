"""Text of a growing list of token ids. No torch."""

from __future__ import annotations

from typing import Any

REPLACEMENT = "\ufffd"


class TextStream:
    """Incremental detokenisation that never emits half a character.

    Only a short tail is decoded again per call: from `_prefix`, far enough back to see how tokens join, the text up to
    `_read` has been emitted. Text that ends in a replacement character waits for the bytes that complete it. Works
    with any tokenizer that has `decode` (the scheme of Hugging Face's text-generation-inference).
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._prefix = self._read = 0
        self.text = ""

    def push(self, token_ids: list[int], *, final: bool) -> str:
        """Append `token_ids`; return the text that became certain. `final` returns whatever is left."""
        self._ids += token_ids
        before = self._decode(self._ids[self._prefix : self._read])
        now = self._decode(self._ids[self._prefix :])
        if len(now) <= len(before) or (now.endswith(REPLACEMENT) and not final):
            return ""
        piece = now[len(before) :]
        self._prefix, self._read = self._read, len(self._ids)
        self.text += piece
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text
