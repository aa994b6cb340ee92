"""Paged attention for the CPU in C++ (`paged_attention.cpp`): no schedule, no gather, no mask.

It reads block tables and lengths itself, so `prepare` has nothing to do, and a decode step and a prefill are the same
call. The bits of a token's result follow from its query, its position and the K and V it sees, whatever the batch, the
number of new tokens and the number of threads.
"""

from __future__ import annotations

import struct
from typing import Any

import torch

from attention.cpu.native_library import NoNativeError, native_library
from attention.op import LIBRARY, SCHEMA, OpBackend, define_op, fake_attend

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of the cache, as the source numbers them
CALL = struct.Struct("9P 11q 9i 2f")  # `Call` of the source


def paged_attention_native(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, *rest: Any
) -> torch.Tensor:
    """Store `key`/`value` `[B, Hkv, L, D]`, attend with `query` `[B, Hq, L, D]`, return `[B, L, Hq, D]`."""
    tables, lens, starts, slots, _, scale, window, softcap = rest
    assert kv_cache.is_contiguous()
    assert tables.dtype is lens.dtype is starts.dtype is torch.int32
    dtype, (batch, heads, length, head_dim) = query.dtype, query.shape
    _, _, kv_heads, page_size, _ = kv_cache.shape
    query = _readable(query, torch.float32)
    key, value = _readable(key, kv_cache.dtype), _readable(value, kv_cache.dtype)
    out = torch.empty((batch, length, heads, head_dim))
    tensors = (query, key, value, kv_cache, tables, lens, starts, slots, out)
    call = CALL.pack(
        *[tensor.data_ptr() for tensor in tensors], *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        tables.stride(0), length, len(lens), batch * length, heads, kv_heads, head_dim, page_size, window or 0,
        DTYPES[kv_cache.dtype], torch.get_num_threads(), scale, softcap or 0.0,
    )  # fmt: skip
    native_library().paged_attention(call)
    return out if dtype is torch.float32 else out.to(dtype)


def _readable(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In `dtype`, the numbers of the last dimension side by side. A check is cheaper than an op without effect."""
    if tensor.dtype is not dtype:
        tensor = tensor.to(dtype)
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


class NativeBackend(OpBackend):
    """Decode steps and prefill on the CPU. Any head size, sliding windows and soft caps; the arithmetic is float32.

    Raises NoNativeError where the source cannot be built, or for a cache in another `dtype` than it knows.
    """

    name = "cpu"
    op = define_op(LIBRARY, "cpu_native", SCHEMA, paged_attention_native, fake_attend)

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        if dtype not in DTYPES:
            raise NoNativeError(f"it knows {', '.join(map(str, DTYPES))}, not {dtype}")
        native_library()
