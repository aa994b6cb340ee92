"""What the samplers read per row: parameters of a request, on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch

MASK32 = 0xFFFFFFFF


def as_int32(value: int) -> int:
    """The signed 32-bit integer with the low 32 bits of `value`."""
    value &= MASK32
    return value - (1 << 32) if value >> 31 else value


class SamplingRows(NamedTuple):
    """Sampling parameters of R rows (or of all slots)."""

    temperature: torch.Tensor  # [R] float32, 0 = greedy
    top_k: torch.Tensor  # [R] int32, 0 = off
    top_p: torch.Tensor  # [R] float32
    min_p: torch.Tensor  # [R] float32
    seed: torch.Tensor  # [R, 2] int32, low and high word
    completion: torch.Tensor  # [R] int32, which of the completions that share the seed

    def rows(self, slots: torch.Tensor) -> SamplingRows:
        return SamplingRows(*(field.index_select(0, slots) for field in self))


class ProcessorRows(NamedTuple):
    """What changes the logits of R rows (or of all slots), beside the tokens before them."""

    repetition: torch.Tensor  # [R] float32, 1 = off
    presence: torch.Tensor  # [R] float32
    frequency: torch.Tensor  # [R] float32
    num_prompt: torch.Tensor  # [R] int64, tokens of the prompt
    bias: torch.Tensor  # [R, V] float32, -inf forbids
    phrases: torch.Tensor  # [R, W, L] int32, aligned right; -1 before the first token and in unused entries
    until: torch.Tensor  # [R, W] int64, a phrase is forbidden at places below; 0 = unused

    def rows(self, slots: torch.Tensor) -> ProcessorRows:
        return ProcessorRows(*(field.index_select(0, slots) for field in self))
