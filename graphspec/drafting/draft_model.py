"""A smaller causal language model drafts (Leviathan et al. 2023, arXiv:2211.17192), inside the captured step.

Its KV lies on the pages of the target, in tensors of its own. A step feeds it the emitted tokens of the rows in one
forward of the target's shape, 1 + k tokens, which writes their KV and gives the first draft, and then k - 1 drafts one
by one. So its KV is one token ahead of the target's, the newest token included, and drafting reaches k - 1 places past
the upper bound of a request.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from attention import AttentionBackend, Bucket
from graphspec.drafting.protocol import DrafterBuffers, DraftInputs, Drafts, HistoryDrafter, PromptChunks
from graphspec.models.paged_model import PagedModel
from graphspec.models.paging import Paging
from graphspec.sampling.processors import Context


class DraftModelDrafter(HistoryDrafter):
    """Drafts with `model`, which is bound to its KV cache and to `attention`.

    With `shares_noise` a draft is drawn as the target draws, with its noise and its processors, and so more often is
    the token the target draws; otherwise it is the model's most likely token. Without temperature and processors the
    two are the same. Beyond the context of the draft model positions stand still, and drafts count as filler.

    Its vocabulary may be padded to another size than the `vocab_size` of the target: then ids it does not have, which
    no tokenizer gives, are read as its last one, and its own that the target does not have are never drafted.
    """

    name = "draft_model"
    drafts_ahead = False
    reads_prompt = True

    def __init__(
        self, model: PagedModel, attention: AttentionBackend, paging: Paging, vocab_size: int, *, shares_noise: bool
    ) -> None:
        self._model, self._attention, self._paging = model, attention, paging
        self._vocab_size, self._shares_noise = vocab_size, shares_noise
        self._last_position = model.facts.max_positions - 1
        self._rungs: list[int] = []
        self._block_tables = torch.empty(0)

    def lookahead(self, num_draft: int) -> int:
        return max(0, num_draft - 1)

    def plan(self, buckets: Sequence[Bucket], table_width: int) -> None:
        self._rungs = sorted({bucket.rows for bucket in buckets})
        # Its own, since attention may have been planned with their address and a prefill brings other ones.
        shape = (self._rungs[-1], table_width)
        self._block_tables = torch.full(
            shape, self._paging.scratch_page, dtype=torch.int32, device=self._model.kv_caches[0].device
        )
        single = [Bucket(rows, 1) for rows in self._rungs]
        self._attention.plan(list(dict.fromkeys((*buckets, *single))), self._block_tables)

    def buffers(self) -> DrafterBuffers:
        return DrafterBuffers(
            by_page={f"kv.{layer}": kv_cache for layer, kv_cache in enumerate(self._model.kv_caches)},
            scratch={"block_tables": self._block_tables, **self._attention.buffers()},
        )

    def plan_prefill(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start: torch.Tensor) -> None:
        self._attention.plan_prefill(block_tables, seq_lens, query_start)

    def prefill(self, chunks: PromptChunks) -> None:
        positions = chunks.positions.clamp(max=self._last_position)
        self._model.forward(self._readable(chunks.token_ids).unsqueeze(0), positions.unsqueeze(0), chunks.paged, 1)

    def propose(self, inputs: DraftInputs, num_draft: int) -> Drafts:
        rows, width = inputs.tokens.shape
        tables = self._stage_tables(inputs.block_tables)
        spare = len(tables) - rows  # after a prefill: rows up to the next shape that attention is planned for
        tokens, start = F.pad(inputs.tokens, (0, 0, 0, spare)), F.pad(inputs.start, (0, spare))
        offsets = torch.arange(width, device=tokens.device)
        logits = self._forward(tables, tokens, start.unsqueeze(1) + offsets)[:rows]
        last = (inputs.num_emitted - 1).view(-1, 1, 1).expand(-1, 1, logits.shape[-1])
        history, newest = inputs.history, inputs.newest.unsqueeze(1)
        drafts = [self._draw(logits.gather(1, last), history, newest, inputs)]
        for _ in range(num_draft - 1):
            newest = newest + 1
            history = history.scatter(1, newest, drafts[-1])
            logits = self._forward(tables, F.pad(drafts[-1], (0, 0, 0, spare)), F.pad(newest, (0, 0, 0, spare)))[:rows]
            drafts.append(self._draw(logits, history, newest, inputs))
        inside = self._last_position + 1 - inputs.newest  # tokens from the newest on that its context still holds
        return Drafts(torch.cat(drafts, dim=1), inside.clamp(0, num_draft))

    def _stage_tables(self, block_tables: torch.Tensor) -> torch.Tensor:
        """The static tables, holding `block_tables` and then rows on the scratch page, up to the next bucket."""
        rows = len(block_tables)
        tables = self._block_tables[: next(rung for rung in self._rungs if rung >= rows)]
        tables[:rows].copy_(block_tables)
        tables[rows:].fill_(self._paging.scratch_page)
        return tables

    def _forward(self, tables: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits `[R, Q, V]` behind `tokens` `[R, Q]`, whose KV is written at `positions`. V is the target's."""
        paged = self._paging.decode_inputs(tables, positions)
        self._attention.prepare(paged)
        logits = self._model.forward(self._readable(tokens), positions.clamp(max=self._last_position), paged)[0]
        missing = self._vocab_size - logits.shape[-1]
        return F.pad(logits, (0, missing), value=float("-inf")) if missing > 0 else logits[..., : self._vocab_size]

    def _readable(self, token_ids: torch.Tensor) -> torch.Tensor:
        own = self._model.facts.vocab_size
        return token_ids if own >= self._vocab_size else token_ids.clamp(max=own - 1)

    def _draw(
        self, logits: torch.Tensor, history: torch.Tensor, newest: torch.Tensor, inputs: DraftInputs
    ) -> torch.Tensor:
        """The token `[R, 1]` that follows position `newest` `[R, 1]`."""
        if not self._shares_noise:
            return logits.argmax(dim=-1)
        processed = inputs.sampler.process(logits, Context(history, newest))
        return inputs.sampler.draw(processed, newest + 1)
