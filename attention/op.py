"""The op that every backend wraps itself in: store the new K/V, then attend.

FlashInfer registers no torch ops, so under `torch.compile` and fake tensors its calls would run for real. Our op has
one declared mutation, the KV cache of the layer, and a fake implementation.

A backend that keeps plans needs an op that finds them, and an op is given only tensors and numbers. Such a backend
(`KernelBackend`) owns an op whose implementation is a method of it: the dispatcher is the registry, and no table of
handles outlives an engine.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from attention.backend import AttentionSpec, Planless
from attention.kv_cache import store_kv
from attention.types import AttnInputs

NAMESPACE = "paged_attention"
SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor block_tables, Tensor seq_lens, "
    "Tensor query_start, Tensor slot_mapping, int query_len, float scale, int? window, float? softcap) -> Tensor"
)


def fake_attend(query: torch.Tensor, *rest: Any) -> torch.Tensor:
    """`[B, Hq, L, D]` -> `[B, L, Hq, D]`, contiguous."""
    batch, heads, length, head_dim = query.shape
    return query.new_empty((batch, length, heads, head_dim))


def inputs_and_spec(rest: Sequence[Any]) -> tuple[AttnInputs, AttentionSpec]:
    """What an op is given behind query, key, value and cache, as SCHEMA lists it."""
    count = len(AttnInputs._fields)
    return AttnInputs(*rest[:count]), AttentionSpec(*rest[count:])


class OpBackend(Planless):
    """A backend that is one op of SCHEMA."""

    op: OpOverload

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        inputs: AttnInputs,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        out: torch.Tensor = self.op(query, key, value, kv_cache, *inputs, *spec)
        return out


# Of ops without state, which live as long as the process.
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


def define_op(
    library: torch.library.Library,
    name: str,
    schema: str,
    implementation: Callable[..., torch.Tensor | None],
    fake: Callable[..., torch.Tensor | None],
) -> OpOverload:
    """`paged_attention::<name>`, which lives as long as `library`."""
    library.define(name + schema)  # type: ignore[no-untyped-call]
    library.impl(name, implementation, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    op: OpOverload = getattr(torch.ops.paged_attention, name).default
    return op


class KernelBackend(OpBackend, ABC):
    """A backend around one kernel launch, as an op of its own, `paged_attention::<name>_<id>`.

    The op lives as long as the backend and does not keep it alive.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        launch = weakref.WeakMethod(self.launch)

        def implementation(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, *rest: Any
        ) -> torch.Tensor:
            (inputs, spec), alive = inputs_and_spec(rest), launch()
            assert alive is not None, "the backend of this op is gone"
            store_kv(kv_cache, key, value, inputs.slot_mapping)
            batch, heads, length, head_dim = query.shape
            out = torch.empty((batch, length, heads, head_dim), dtype=query.dtype, device=query.device)
            flat = query.transpose(1, 2).reshape(-1, heads, head_dim)
            alive(flat, kv_cache, inputs, spec, out.view(-1, heads, head_dim))
            return out

        self._library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
        self.op = define_op(self._library, f"{name}_{id(self):x}", SCHEMA, implementation, fake_attend)

    @abstractmethod
    def launch(
        self, query: torch.Tensor, kv_cache: torch.Tensor, inputs: AttnInputs, spec: AttentionSpec, out: torch.Tensor
    ) -> None:
        """Attend with `query` `[T, Hq, D]`, whose K/V are stored, and write `out` `[T, Hq, D]`. Both contiguous."""
