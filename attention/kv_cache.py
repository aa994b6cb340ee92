"""The paged K/V cache: allocation and the store of new tokens."""

from __future__ import annotations

import math

import numpy as np
import torch

from attention.types import KVLayout


def allocate_kv_cache(layout: KVLayout, device: torch.device) -> list[torch.Tensor]:
    """One zeroed tensor per layer. On the CPU a page costs memory only once it is written."""
    if device.type != "cpu":
        return [torch.zeros(layout.layer_shape, dtype=layout.dtype, device=device) for _ in range(layout.num_layers)]
    size = math.prod(layout.layer_shape) * layout.dtype.itemsize  # numpy's zeros are lazy, torch's are written
    buffers = [torch.from_numpy(np.zeros(size, np.uint8)) for _ in range(layout.num_layers)]
    return [buffer.view(layout.dtype).view(layout.layer_shape) for buffer in buffers]


def store_kv(kv_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write `key` and `value` `[B, Hkv, L, D]` at the places `slot_mapping` `[B * L]` names. In place.

    Two tokens may share a place only on the scratch page; which of them stays there is unspecified.
    """
    _, _, heads, page_size, head_dim = kv_cache.shape
    pages, offsets = slot_mapping // page_size, slot_mapping % page_size
    for index, new in ((0, key), (1, value)):
        tokens = new.transpose(1, 2).reshape(-1, heads, head_dim).to(kv_cache.dtype)  # [T, Hkv, D]
        kv_cache.select(1, index).transpose(1, 2).index_put_((pages, offsets), tokens)  # view [pages, page, Hkv, D]
