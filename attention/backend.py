"""The backend protocol: what is decided when, so that a captured step stays right for every length.

    create        once, from an `AttentionShape`; refuses in one sentence what it cannot do
    plan          once, before the first capture: host work and allocations for every bucket of decode steps
    plan_prefill  before every prefill, on the host, where the lengths of prompts are exact
    prepare       captured, once per decode step before the first layer: whatever follows from the true lengths
    attend        captured, once per layer

Only tensors change between two replays. A backend that needs a schedule computes it in `prepare`, on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from attention.types import AttnInputs, Bucket


class UnsupportedAttentionError(ValueError):
    """A backend cannot serve a shape; the sentence names one that can."""


class AttentionSpec(NamedTuple):
    """The parameters of the attention of a layer."""

    scale: float
    window: int | None = None  # a token sees itself and the window - 1 tokens before it; None = everything before it
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)


@dataclass(frozen=True)
class AttentionShape:
    """Everything static about the attention of an engine."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    table_width: int  # P, block-table entries of a row
    dtype: torch.dtype  # of queries, keys and values
    device: torch.device
    specs: tuple[AttentionSpec, ...]  # the distinct ones of the model's layers

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def longest(self) -> int:
        """Tokens that a row of the block tables can hold."""
        return self.table_width * self.page_size


class AttentionBackend(Protocol):
    """Stores the new K/V and attends, as one op that can be compiled, recorded and captured."""

    @property
    def name(self) -> str:
        """Shown in logs and reports."""

    def plan(self, buckets: Sequence[Bucket], block_tables: torch.Tensor) -> None:
        """Get ready for decode steps of `buckets`. `block_tables` `[max rows, P]` int32 is the static tensor whose
        leading rows every decode step will read; the caller owns it."""

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The tensors that `prepare` writes in place, by name. Fixed once `plan` has returned."""

    def plan_prefill(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start: torch.Tensor) -> None:
        """Get ready for one prefill, on the stream it will run on. Host tensors, see `AttnInputs`."""

    def prepare(self, inputs: AttnInputs) -> None:
        """Derive from the true lengths of a decode step whatever its layers share."""

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


class Planless:
    """The parts of the protocol that do nothing in a backend without a schedule."""

    def plan(self, buckets: Sequence[Bucket], block_tables: torch.Tensor) -> None:
        pass

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return {}

    def plan_prefill(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start: torch.Tensor) -> None:
        pass

    def prepare(self, inputs: AttnInputs) -> None:
        pass
