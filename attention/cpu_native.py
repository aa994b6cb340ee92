"""Paged attention for the CPU in C++ (`paged_attention.cpp`): no schedule, no gather, no mask.

It reads block tables and lengths itself, so `prepare` has nothing to do, and a decode step and a prefill are the same
call. The bits of a token's result follow from its query, its position and the K and V it sees, whatever the batch, the
number of new tokens and the number of threads.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from attention.native import Call, native_library
from attention.op import NAMESPACE, SCHEMA, OpBackend, fake_attend, inputs_and_spec

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of the cache, as the source numbers them

torch.library.define(f"{NAMESPACE}::cpu_native", SCHEMA)
torch.library.register_fake(f"{NAMESPACE}::cpu_native", fake_attend)


@torch.library.impl(f"{NAMESPACE}::cpu_native", "CompositeExplicitAutograd")
def paged_attention_native(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, *rest: Any
) -> torch.Tensor:
    """Store `key`/`value` `[B, Hkv, L, D]`, attend with `query` `[B, Hq, L, D]`, return `[B, L, Hq, D]`."""
    (tables, lens, starts, slots, _), spec = inputs_and_spec(rest)
    assert kv_cache.is_contiguous() and lens.is_contiguous() and starts.is_contiguous() and slots.is_contiguous()
    assert tables.dtype == lens.dtype == starts.dtype == torch.int32 and slots.dtype == torch.int64
    dtype, (batch, heads, length, head_dim) = query.dtype, query.shape
    query, key, value = _dense(query.float()), _dense(key.to(kv_cache.dtype)), _dense(value.to(kv_cache.dtype))
    out = torch.empty((batch, length, heads, head_dim))
    pointers = (t.data_ptr() for t in (query, key, value, kv_cache, tables, lens, starts, slots, out))
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3])
    call = Call(
        *pointers, *strides, tables.stride(0), length, len(lens), batch * length, heads, kv_cache.shape[2], head_dim,
        kv_cache.shape[3], spec.window or 0, DTYPES[kv_cache.dtype], torch.get_num_threads(), spec.scale,
        spec.softcap or 0.0,
    )  # fmt: skip
    native_library().paged_attention(ctypes.byref(call))
    return out.to(dtype)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class NativeBackend(OpBackend):
    """Decode steps and prefill on the CPU. Any head size, sliding windows and soft caps; the arithmetic is float32.

    Raises NoNativeError where the source cannot be built.
    """

    name = "cpu"
    op = torch.ops.paged_attention.cpu_native.default

    def __init__(self) -> None:
        native_library()
