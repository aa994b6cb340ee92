"""Paged attention for the CPU, on torch ops alone: nothing has to be compiled.

On a CPU an op costs microseconds before it does anything, so a layer takes few: two stores, a gather, the fused kernel.
Everything that the layers of a step share is made by `prepare`: where new tokens go, which tokens are gathered, the
mask. Places past the end of a row, which may hold anything, NaN included, are never read: in their stead the first new
token of the row is, and the mask hides it.

Keys are visited in chunks of a fixed length, as if each were a row of a batch, so long contexts keep every thread busy
and a short row beside a long one costs little. The results of a row's chunks are weighted by their log-sum-exp.

What depends on the true lengths has no static shape. It stays inside the backend, where only its two opaque ops see it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from attention.backend import AttentionShape, AttentionSpec
from attention.cpu.schedule import HIDDEN, Places, PromptChunk, Schedule, decode_schedule, prompt_chunk
from attention.op import NAMESPACE, SCHEMA, define_op, fake_attend, inputs_and_spec
from attention.types import AttnInputs, Bucket

CAPPED_QUERIES = 64  # query tokens of a prefill that are scored at once where soft caps rule out the fused kernel

PREPARE = "(Tensor block_tables, Tensor seq_lens, Tensor slot_mapping, Tensor(a!) places, int query_len) -> ()"
# `places` makes the layers of a decode step depend on its `prepare`.
ATTEND = SCHEMA.replace("Tensor block_tables", "Tensor places, Tensor block_tables")


class Gathered(NamedTuple):
    """Views of scratch memory that the next gather overwrites."""

    target: torch.Tensor  # [N, D] in the dtype of the cache
    floats: torch.Tensor  # [N, D] float32, the same memory if that is the dtype of the cache
    keys: torch.Tensor  # [B, 1, C, D] float32
    values: torch.Tensor


class CpuBackend:
    """Decode steps and prefill on the CPU. Any head size, sliding windows and soft caps; the arithmetic is float32."""

    name = "cpu"

    def __init__(self, shape: AttentionShape, native_reason: str | None = None) -> None:
        self.native_reason = native_reason  # why the backend in C++ is not used, if it was wanted
        self._shape, self._layout = shape, Places(shape)
        self._windows = tuple(dict.fromkeys(spec.window for spec in shape.specs))
        self._places = torch.zeros((2, 0), dtype=torch.int64)  # of the new K and V, see `Places`
        self._scratch = {dtype: torch.empty(0, dtype=dtype) for dtype in (shape.dtype, torch.float32)}
        self._new = (self._places[0], self._places[1])
        self._decode: dict[int | None, tuple[Schedule, list[Gathered]]] = {}
        self._prefill: dict[int | None, list[PromptChunk]] = {}
        self._library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
        unique = f"{id(self):x}"
        self.op = define_op(self._library, f"cpu_{unique}", ATTEND, _weak(self._attend), fake_attend)
        self.prepare_op = define_op(
            self._library, f"cpu_prepare_{unique}", PREPARE, _weak(self._prepare), lambda *args: None
        )

    def plan(self, buckets: Sequence[Bucket], block_tables: torch.Tensor) -> None:
        most = max(bucket.rows * bucket.query_len for bucket in buckets)
        self._places = torch.zeros((2, most * self._shape.num_kv_heads), dtype=torch.int64)

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return {"places": self._places}

    def plan_prefill(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start: torch.Tensor) -> None:
        tables, lens = block_tables.numpy().astype(np.int64), seq_lens.tolist()
        spans = list(pairwise(query_start.tolist()))
        self._prefill = {
            window: [prompt_chunk(self._shape, tables[r], lens[r], *span, window) for r, span in enumerate(spans)]
            for window in self._windows
        }

    def prepare(self, inputs: AttnInputs) -> None:
        self.prepare_op(inputs.block_tables, inputs.seq_lens, inputs.slot_mapping, self._places, inputs.query_len)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        inputs: AttnInputs,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        out: torch.Tensor = self.op(query, key, value, kv_cache, self._places, *inputs, *spec)
        return out

    def _prepare(
        self,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        slot_mapping: torch.Tensor,
        places: torch.Tensor,
        query_len: int,
    ) -> None:
        stored = torch.stack(self._stored(slot_mapping.view(-1, query_len)))  # [2, R, Hkv, L]
        new = places[:, : stored[0].numel()].view(stored.shape).copy_(stored)
        self._new = (new[0], new[1])
        tables, lens = block_tables.numpy().astype(np.int64), seq_lens.numpy().astype(np.int64)
        self._decode = {}
        for window in self._windows:
            schedule = decode_schedule(self._shape, tables, lens, query_len, window)
            views = [self._gathered(len(group.tokens), len(group.mask)) for group in schedule.groups]
            self._decode[window] = (schedule, views)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        places: torch.Tensor,
        *rest: Any,
    ) -> torch.Tensor:
        inputs, spec = inputs_and_spec(rest)
        flat = kv_cache.view(-1, self._shape.head_dim)
        keys, values = self._new if inputs.query_len else self._stored(inputs.slot_mapping[None])
        flat.index_put_((keys,), key)
        flat.index_put_((values,), value)
        if inputs.query_len:
            return self._attend_rows(query, flat, spec)
        return self._attend_prompts(query, key, value, flat, spec)

    def _stored(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Places for K and V of new tokens with `slots` `[R, L]`, `[R, Hkv, L]` each."""
        keys, values = torch.from_numpy(self._layout.stored(slots.numpy()))
        return keys, values

    def _attend_rows(self, query: torch.Tensor, flat: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """A decode step: `query` `[R, Hq, L, D]` -> `[R, L, Hq, D]`."""
        rows, heads, length, head_dim = query.shape
        folded = self._shape.group * length
        schedule, views = self._decode[spec.window]
        q = query.float().reshape(-1, 1, folded, head_dim)  # [R * Hkv, 1, G * L, D]
        parts = []
        for group, gathered in zip(schedule.groups, views, strict=True):
            mine = q
            if group.rows is not None:
                mine = q.view(rows, -1).index_select(0, group.rows).view(-1, 1, folded, head_dim)
            _gather(flat, group.tokens, gathered)
            parts.append(_attend_group(mine, gathered.keys, gathered.values, group.mask, spec))
        out = parts[0][0] if len(parts) == 1 else torch.cat([part for part, _ in parts])
        if schedule.most > 1:
            out = _merge(out, torch.cat([sums for _, sums in parts]), rows, schedule)
        return out.view(rows, heads, length, head_dim).transpose(1, 2).to(query.dtype).contiguous()

    def _attend_prompts(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, flat: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """A packed prefill: `query` `[1, Hq, T, D]` -> `[1, T, Hq, D]`."""
        _, heads, tokens, head_dim = query.shape
        kv_heads, folded = self._shape.num_kv_heads, (self._shape.num_kv_heads, self._shape.group)
        out = torch.empty((1, tokens, heads, head_dim), dtype=query.dtype)
        q = query.view(*folded, tokens, head_dim)
        target = out.view(tokens, *folded, head_dim).permute(1, 2, 0, 3)  # [Hkv, G, T, D], as q
        for chunk in self._prefill[spec.window]:
            span = slice(chunk.start, chunk.end)
            if chunk.tokens is None:
                keys, values = key[0, :, None, span].float(), value[0, :, None, span].float()
            else:
                gathered = self._gathered(len(chunk.tokens), kv_heads)
                _gather(flat, chunk.tokens, gathered)
                keys, values = gathered.keys, gathered.values
            target[:, :, span] = _attend_prompt(q[:, :, span].float(), keys, values, chunk.mask, spec)
        return out

    def _gathered(self, count: int, batch: int) -> Gathered:
        """Scratch memory for `count` gathered rows of the cache, K and V of `batch` heads in turns."""
        head_dim = self._shape.head_dim
        for dtype, scratch in self._scratch.items():
            if scratch.numel() < count * head_dim:
                self._scratch[dtype] = torch.empty(count * head_dim, dtype=dtype)
        dtypes = (self._shape.dtype, torch.float32)
        target, floats = (self._scratch[dtype][: count * head_dim].view(count, head_dim) for dtype in dtypes)
        return Gathered(target, floats, *floats.view(batch, 2, 1, -1, head_dim).unbind(1))


def _weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method`, without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        assert alive is not None, "the backend of this op is gone"
        return alive(*args)

    return call


def _gather(flat: torch.Tensor, tokens: torch.Tensor, gathered: Gathered) -> None:
    torch.index_select(flat, 0, tokens, out=gathered.target)
    if flat.dtype != torch.float32:
        gathered.floats.copy_(gathered.target)


def _attend_group(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """`q` `[B, 1, M, D]`, `k` and `v` `[B, 1, N, D]` -> result `[B, 1, M, D]` and log-sums `[B, 1, M]`."""
    if spec.softcap is None:
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = fused(q, k, v, 0.0, False, attn_mask=mask, scale=spec.scale)
        return out, sums
    scores = torch.matmul(q, k.transpose(-1, -2)).mul_(spec.scale / spec.softcap).tanh_().mul_(spec.softcap).add_(mask)
    return torch.matmul(scores.softmax(-1), v), scores.logsumexp(-1)


def _merge(out: torch.Tensor, sums: torch.Tensor, rows: int, schedule: Schedule) -> torch.Tensor:
    """Results `[E * Hkv, 1, G * L, D]` of chunks, whose weights have the log-sums `[E * Hkv, 1, G * L]`, merged to
    those of rows `[R, Hkv * G * L, D]`."""
    out, sums = out.view(schedule.chunks, -1, out.shape[-1]), sums.view(schedule.chunks, -1)
    if schedule.parts is not None:  # rows with fewer chunks take the one behind the last, which weighs nothing
        out = torch.cat((out, torch.zeros_like(out[:1]))).index_select(0, schedule.parts)
        sums = torch.cat((sums, torch.full_like(sums[:1], HIDDEN))).index_select(0, schedule.parts)
    weights = sums.view(rows, schedule.most, -1, 1).softmax(1)
    return (out.view(rows, schedule.most, *out.shape[1:]) * weights).sum(1)


def _attend_prompt(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, spec: AttentionSpec
) -> torch.Tensor:
    """`q` `[Hkv, G, L, D]`, `k` and `v` `[Hkv, 1, N, D]` -> `[Hkv, G, L, D]`; without a mask causal."""
    kv_heads, group, length, head_dim = q.shape
    if spec.softcap is None:
        # The heads of a group read the same K and V: a stride of zero instead of copies.
        k, v = k.expand(-1, group, -1, -1), v.expand(-1, group, -1, -1)
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out: torch.Tensor = fused(q, k, v, 0.0, mask is None, attn_mask=mask, scale=spec.scale)[0]
        return out
    assert mask is not None
    blocks = []
    for start in range(0, length, CAPPED_QUERIES):
        block = q[:, :, start : start + CAPPED_QUERIES]
        seen = mask[start : start + CAPPED_QUERIES].repeat(group, 1)
        part, _ = _attend_group(block.reshape(kv_heads, 1, -1, head_dim), k, v, seen, spec)
        blocks.append(part.view(block.shape))
    return torch.cat(blocks, dim=2)
