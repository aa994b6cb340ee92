"""Paged attention in plain torch, on any device: the oracle for every other backend.

K/V store and attention are one custom op that declares its mutation. Inside a compiled or recorded region that keeps
the cache in place, and it keeps the true lengths, which only the device knows, out of sight of the tracer: they are
read inside the op, so its work grows with them and not with the capacity of the block tables.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from attention.kv_cache import store_kv
from attention.op import LIBRARY, SCHEMA, OpBackend, define_op, fake_attend, inputs_and_spec

# Keys visited at once; bounds the scratch memory of long contexts.
BLOCK_TOKENS = 512


def paged_attention_reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, *rest: Any
) -> torch.Tensor:
    """Store `key`/`value` `[B, Hkv, L, D]`, attend with `query` `[B, Hq, L, D]`, return `[B, L, Hq, D]`.

    Either every row has the same number of query tokens and B is the number of rows (decode), or B is 1 and the rows
    are packed along L as `query_start` says (prefill). All rows are stored before any row attends.
    """
    inputs, spec = inputs_and_spec(rest)
    tables, lens = inputs.block_tables, inputs.seq_lens
    store_kv(kv_cache, key, value, inputs.slot_mapping)
    if query.shape[0] == len(lens):
        return _attend(query, kv_cache, tables, lens, *spec)
    packed = [
        _attend(query[:, :, a:b], kv_cache, tables[r : r + 1], lens[r : r + 1], *spec)
        for r, (a, b) in enumerate(pairwise(inputs.query_start.tolist()))
    ]
    return torch.cat(packed, dim=1)


def _attend(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Causal attention of the last L tokens of R sequences, in blocks of keys with a running softmax.

    `query` is `[R, Hq, L, D]`; the result `[R, L, Hq, D]`. Query heads of one group are folded into the query axis,
    so K and V are never repeated.
    """
    rows, num_heads, length, head_dim = query.shape
    _, _, kv_heads, page_size, _ = kv_cache.shape
    group = num_heads // kv_heads
    q = (query.float() * scale).reshape(rows * kv_heads, group * length, head_dim)
    query_pos = seq_lens.unsqueeze(1) - length + torch.arange(length, device=query.device)  # [R, L]

    first_page, end_page = _page_range(seq_lens, length, window, page_size, block_tables.shape[1])
    block_pages = max(1, BLOCK_TOKENS // page_size)
    peak = q.new_full((rows * kv_heads, group * length, 1), -1e30)  # finite, so that a fully masked block adds zero
    total = q.new_zeros((rows * kv_heads, group * length, 1))
    out = torch.zeros_like(q)
    for page in range(first_page, end_page, block_pages):
        k, v = _gather(kv_cache, block_tables[:, page : min(page + block_pages, end_page)])
        key_pos = page * page_size + torch.arange(k.shape[1], device=q.device)
        visible = key_pos <= query_pos.unsqueeze(-1)  # [R, L, N]
        if window is not None:
            visible &= key_pos > query_pos.unsqueeze(-1) - window
        scores = torch.bmm(q, k.transpose(1, 2))
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.view(rows, kv_heads * group, length, -1).masked_fill_(~visible.unsqueeze(1), float("-inf"))
        scores = scores.view(rows * kv_heads, group * length, -1)
        # Places past the end of a sequence may hold anything, NaN included, and 0 * NaN is NaN.
        unused = (key_pos >= seq_lens.unsqueeze(1)).repeat_interleave(kv_heads, dim=0)
        v = v.masked_fill_(unused.unsqueeze(-1), 0.0)
        new_peak = torch.maximum(peak, scores.amax(dim=-1, keepdim=True))
        weights = torch.exp(scores - new_peak)
        decay = torch.exp(peak - new_peak)
        total = total * decay + weights.sum(dim=-1, keepdim=True)
        out = torch.baddbmm(out * decay, weights, v)
        peak = new_peak
    out = (out / total).view(rows, num_heads, length, head_dim)
    return out.transpose(1, 2).to(query.dtype).contiguous()


def _page_range(
    seq_lens: torch.Tensor, length: int, window: int | None, page_size: int, table_width: int
) -> tuple[int, int]:
    """Columns of the block tables that some row may see. On the CPU exactly those that the true lengths need; a CUDA
    graph cannot read lengths, so there it is all of them and the mask does the rest: correct, and slow."""
    if seq_lens.device.type != "cpu":
        return 0, table_width
    first = 0 if window is None else max(0, int(seq_lens.min()) - length - window + 1)
    return first // page_size, -(-int(seq_lens.max()) // page_size)


def _gather(kv_cache: torch.Tensor, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of `pages` `[R, N]` as float32 `[R * Hkv, N * page_size, D]`, laid out for one batched product."""
    _, _, kv_heads, page_size, head_dim = kv_cache.shape
    flat = kv_cache.view(-1, page_size * head_dim)  # row = (page * 2 + k_or_v) * Hkv + head
    heads = torch.arange(kv_heads, device=pages.device).view(1, -1, 1)
    index = (pages.unsqueeze(1) * (2 * kv_heads) + heads).flatten()
    shape = (pages.shape[0] * kv_heads, pages.shape[1] * page_size, head_dim)
    return flat.index_select(0, index).view(shape).float(), flat.index_select(0, index + kv_heads).view(shape).float()


class ReferenceBackend(OpBackend):
    """The plain one: any device, any head size, sliding windows and soft caps."""

    name = "reference"
    op = define_op(LIBRARY, "reference", SCHEMA, paged_attention_reference, fake_attend)
