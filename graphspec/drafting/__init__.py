"""Drafters, one file each, behind one protocol."""

from graphspec.config import EngineConfig
from graphspec.drafting.forced import ForcedDrafter
from graphspec.drafting.ngram import NgramDrafter
from graphspec.drafting.none import NoDrafter
from graphspec.drafting.protocol import Drafter

__all__ = ["Drafter", "ForcedDrafter", "NgramDrafter", "NoDrafter", "create_drafter"]


def create_drafter(config: EngineConfig) -> Drafter:
    """The drafter a configuration names; without speculation it is always `NoDrafter`."""
    if config.num_speculative_tokens == 0:
        return NoDrafter()
    ngram = NgramDrafter(config.ngram_min, config.ngram_max)
    return ForcedDrafter(ngram, config.forced_num_accepted) if config.drafter == "forced" else ngram
