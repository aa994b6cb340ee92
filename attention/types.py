"""What paged attention is given: plain tensors with declared shapes and owners."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class KVLayout:
    """Shape of the paged K/V cache. One tensor per layer: `[num_pages, 2, num_kv_heads, page_size, head_dim]`,
    index 0 of the second axis is K, 1 is V (FlashInfer calls this order HND)."""

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def layer_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_pages, 2, self.num_kv_heads, self.page_size, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        per_layer = 2 * self.num_kv_heads * self.page_size * self.head_dim * self.dtype.itemsize
        return self.num_layers * per_layer


class AttnInputs(NamedTuple):
    """Per-launch metadata, the same set for every backend, written on the device before the forward pass.

    A launch holds R rows: a decode step, in which every row brings equally many tokens, or packed chunks of prompts;
    which of the two comes from the state of the requests, never from a shape. Row r brings the query tokens
    `query_start[r] : query_start[r + 1]` of the flattened token axis (T tokens); they are the *last* tokens of a
    sequence of `seq_lens[r]` tokens, and each attends causally to everything up to itself. A padding row points at the
    scratch page and has `seq_lens` = its own query length.
    """

    block_tables: torch.Tensor  # [R, P] int32, page ids; entries without an own page hold the scratch page
    seq_lens: torch.Tensor  # [R] int32, tokens in the sequence, those of this launch included
    query_start: torch.Tensor  # [R + 1] int32
    slot_mapping: torch.Tensor  # [T] int64, page * page_size + offset of every query token's K/V
    query_len: int = 0  # tokens of every row of a decode step, 1 + k; 0 for packed chunks


class Bucket(NamedTuple):
    """The shape of a decode step, all that a captured graph knows of its batch."""

    rows: int
    query_len: int  # 1 + k
