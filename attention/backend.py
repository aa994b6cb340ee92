"""The backend protocol, and the one place that turns a name into a backend."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from attention.types import AttnInputs


class AttentionSpec(NamedTuple):
    """What a layer asks of attention besides its tensors."""

    scale: float
    window: int | None = None  # a token sees itself and the window - 1 tokens before it; None = everything before it
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)


class AttentionBackend(Protocol):
    """Stores the new K/V and attends, as one op that can be compiled, recorded and captured."""

    name: str

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        inputs: AttnInputs,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """`query` `[B, Hq, L, D]`, `key`/`value` `[B, Hkv, L, D]`, `kv_cache` of one layer; returns `[B, L, Hq, D]`.

        B is the number of rows with L tokens each, or 1 with the rows packed along L (see `AttnInputs`).
        """


def create_backend(name: str) -> AttentionBackend:
    """The backend called `name`; "auto" is the best one for this machine. Raises ValueError for an unknown name."""
    from attention.reference import ReferenceBackend

    if name in ("auto", "reference"):
        return ReferenceBackend()
    raise ValueError(f'unknown attention backend "{name}": use "auto" or "reference"')
