"""An n-gram pool that requests share: what followed n tokens the last time anybody of the same salt had them.

It serves loads whose requests resemble each other, many answers to one prompt or one form filled in many times, where
the text of a request alone has nothing to match. Tokens never depend on drafts, so it changes no text.

Privacy: drafts from the text of others make a request faster, so by timing its own requests a client can learn what
other requests of its salt said. Therefore the pool is off by default, and entries are as private as cached prefixes:
they are found only by requests with the `cache_salt` they were written under, and not after `reset_prefix_cache`. What
remains visible is that a table of fixed size forgets, and so that others write.

What launches emit past the end of a request, because the host did not know yet that it had ended, is in the pool too.
So acceptance, unlike text, may depend on how far the scheduler runs ahead.
"""

from __future__ import annotations

import torch

from graphspec.drafting.protocol import Drafts

EMPTY = -1  # no token


class NgramPool:
    """N entries of a hash table and a scratch entry behind them. Fixed size: what maps to a taken entry replaces it.

    An entry holds its whole key, the salt and n tokens, so a collision is a miss; and the one token that followed. A
    draft of k tokens is a chain of k lookups, each checked by n tokens.

    Of several writes to one entry in one call the last wins, whole: the others go to the scratch entry, where padding
    and unfinished n-grams go too, and which every call leaves empty. So no entry is torn and replays are bit-equal.
    """

    def __init__(self, num_entries: int, n: int, scratch_slot: int, device: torch.device) -> None:
        self._num_entries, self._scratch_slot = num_entries, scratch_slot
        self.entries = torch.full((num_entries + 1, n + 2), EMPTY, dtype=torch.int64, device=device)

    def write(self, slots: torch.Tensor, salts: torch.Tensor, tokens: torch.Tensor, whole: torch.Tensor) -> None:
        """Note that `tokens[i, n]` followed `tokens[i, :n]` under `salts[i]`, wherever `whole[i]` and the slot is that
        of a request. `[M]`, `[M]`, `[M, n + 1]` and bool `[M]`."""
        counts = whole & (slots != self._scratch_slot)
        target = torch.where(counts, self._place(salts, tokens[:, :-1]), self._num_entries)
        # Sorted by entry, and stable, the last write to an entry is the one before another entry begins.
        ordered, order = target.sort(stable=True)
        last = torch.ones_like(counts)
        last[:-1] = ordered[1:] != ordered[:-1]
        written = torch.cat((salts.unsqueeze(1), tokens), dim=1).index_select(0, order)
        self.entries.index_copy_(0, torch.where(last, ordered, self._num_entries), written)
        self.entries.select(0, self._num_entries).fill_(EMPTY)

    def chain(self, salts: torch.Tensor, newest: torch.Tensor, known: torch.Tensor, num_draft: int) -> Drafts:
        """What followed the last tokens `newest` `[R, n]`, token by token, up to the first that is not known. `salts`
        and `known`, whether there are n tokens at all, `[R]`. Filler repeats the token before it."""
        drafts, num_valid = [], torch.zeros_like(salts)
        for _ in range(num_draft):
            found = self.entries.index_select(0, self._place(salts, newest))
            known = known & (found[:, 0] == salts) & (found[:, 1:-1] == newest).all(dim=1)
            drafts.append(torch.where(known, found[:, -1], newest[:, -1]))
            num_valid = num_valid + known
            newest = torch.cat((newest[:, 1:], drafts[-1].unsqueeze(1)), dim=1)
        return Drafts(torch.stack(drafts, dim=1), num_valid)

    def _place(self, salts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The entry `[M]` of a key: a polynomial of its words modulo 2**64, with its high bits folded in."""
        mixed = salts
        for column in tokens.unbind(dim=1):
            mixed = torch.add(column, mixed, alpha=0x5851F42D4C957F2D)  # Knuth's MMIX multiplier
        return (mixed ^ (mixed >> 32)) % self._num_entries
