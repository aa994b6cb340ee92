"""The op that every backend wraps itself in: store the new K/V, then attend.

FlashInfer registers no torch ops, so under `torch.compile` and fake tensors its calls would run for real. Our op has
one declared mutation, the KV cache of the layer, and a fake implementation.

A backend that keeps plans needs an op that finds them, and an op is given only tensors and numbers. Such a backend
owns an op of its own (`OwnedOp`) whose implementation is a method of it: the dispatcher is the registry, and no table
of handles outlives an engine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

NAMESPACE = "paged_attention"
SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor block_tables, Tensor seq_lens, "
    "Tensor query_start, Tensor slot_mapping, int query_len, float scale, int? window, float? softcap) -> Tensor"
)


def fake_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    slot_mapping: torch.Tensor,
    query_len: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """`[B, Hq, L, D]` -> `[B, L, Hq, D]`, contiguous."""
    batch, heads, length, head_dim = query.shape
    return query.new_empty((batch, length, heads, head_dim))


class OwnedOp:
    """`paged_attention::<name>_<id of the owner>`, implemented by `method`, which is bound to the owner.

    The op lives as long as this object and does not keep its owner alive.
    """

    def __init__(self, name: str, method: Callable[..., torch.Tensor]) -> None:
        bound = weakref.WeakMethod(method)

        def implementation(*args: torch.Tensor | float | None) -> torch.Tensor:
            alive = bound()
            assert alive is not None, "the backend of this op is gone"
            return alive(*args)

        unique = f"{name}_{id(self):x}"
        self._library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
        self._library.define(unique + SCHEMA)  # type: ignore[no-untyped-call]
        self._library.impl(  # type: ignore[no-untyped-call]
            unique, implementation, "CompositeExplicitAutograd"
        )
        torch.library.register_fake(f"{NAMESPACE}::{unique}", fake_attend, lib=self._library)
        self.overload = getattr(torch.ops.paged_attention, unique).default
