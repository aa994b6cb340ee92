"""Whether the decode steps of an engine read packed weights."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from graphs import LinearPacker, check_packing
from graphspec.config import EngineConfig

log = logging.getLogger(__name__)


def linear_packer(
    user: EngineConfig, device: torch.device, dtype: torch.dtype, constants: Iterable[torch.Tensor]
) -> LinearPacker | None:
    """What packs the weights among `constants`, if they are to be packed.

    Raises ValueError if `pack_weights` asks for it and it cannot be.
    """
    if user.pack_weights is False or user.enforce_eager:
        return None
    try:
        check_packing(device, dtype)
    except ValueError as reason:
        if user.pack_weights:
            raise
        log.info("linear layers read plain weights: %s", reason)
        return None
    return LinearPacker(constants)
