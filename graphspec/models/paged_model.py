"""Transformers causal language models with paged attention plugged in through the attention interface.

Modules and their forwards are never patched. The per-launch `AttnInputs` travel as a keyword argument through
`model(...)` down to the attention function; the KV tensor of a layer hangs on its attention module as a buffer.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import AttentionInterface

from attention import AttentionBackend, AttentionSpec, AttnInputs, Planless
from graphspec.models.packed_linears import ProductCounter, SiblingFinder, Siblings

# Names that contain "flash", "sdpa", "flex" or "paged|" take other paths inside transformers.
ATTENTION_NAME = "graphspec_paged"

# Keyword arguments that reach the attention function and do not change its meaning here. Anything else does, or might,
# and is refused: a model with attention sinks, say, would otherwise compute wrong text without a word.
HARMLESS = {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "layer_idx"}


class UnsupportedModelError(ValueError):
    """The model needs something that paged attention here does not do (yet)."""


@dataclass(frozen=True)
class ModelFacts:
    """What the engine must know of a model."""

    vocab_size: int
    max_positions: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eos_ids: frozenset[int]
    dtype: torch.dtype


def check_config(config: Any) -> None:
    """Refuse, with the reason, architectures whose meaning would silently change here."""
    config = config.get_text_config()
    for rope in _rope_parameters(config):
        if (kind := rope.get("rope_type", "default")) in ("dynamic", "longrope"):
            raise UnsupportedModelError(f'rope type "{kind}" depends on the length of a whole batch: not supported yet')
    layers = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if layers:
        raise UnsupportedModelError(f"layers of type {sorted(layers)} (recurrent, hybrid, ...) are not supported yet")
    for attribute, what in (
        ("kv_lora_rank", "multi-head latent attention"),
        ("alibi", "ALiBi position biases"),
        ("num_kv_shared_layers", "KV shared between layers"),
    ):
        if getattr(config, attribute, None):
            raise UnsupportedModelError(f"{what} is not supported yet")


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]  # one set per layer type
    return nested or [rope]


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged: AttnInputs | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function registered with transformers: `query` `[B, Hq, L, D]` -> (`[B, L, Hq, D]`, None)."""
    unknown = {name for name, given in kwargs.items() if given is not None} - HARMLESS
    if unknown or attention_mask is not None or dropout:
        odd = sorted(unknown) or ["attention_mask" if attention_mask is not None else "dropout"]
        raise UnsupportedModelError(f"the model passes {odd} to attention, which paged attention does not support")
    if paged is None:
        raise UnsupportedModelError("the model does not hand its keyword arguments down to attention")
    backend = cast(AttentionBackend, module.paged_backend)
    spec = AttentionSpec(scaling, sliding_window, softcap)
    return backend.attend(query, key, value, cast(torch.Tensor, module.paged_kv), paged, spec), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


class PagedModel:
    """A causal LM bound to one paged KV cache. `close` gives the module back as it was."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.config = cast(Any, module).config
        check_config(self.config)
        text = self.config.get_text_config()
        self.attention_modules = [m for m in module.modules() if _is_attention(m)]
        if any(hasattr(m, "paged_kv") for m in self.attention_modules):
            raise ValueError(
                "this model object already belongs to an engine: close that engine or load the model again"
            )
        if any(hasattr(m, "sinks") for m in self.attention_modules):
            raise UnsupportedModelError("attention sinks are not supported yet")
        self._previous_attention = text._attn_implementation
        module.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
        self.kv_caches: list[torch.Tensor] = []
        # The linear layers of a forward pass, and how many matrix products run beside them; known once KV is bound.
        self.linears: list[Siblings] = []
        self.num_other_products = 0
        self.mode: AbstractContextManager[Any] = nullcontext()  # entered around every forward pass
        heads = text.num_attention_heads
        self.facts = ModelFacts(
            vocab_size=text.vocab_size,
            max_positions=text.max_position_embeddings,
            num_layers=len(self.attention_modules),
            num_heads=heads,
            num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            eos_ids=_eos_ids(module, text),
            dtype=next(module.parameters()).dtype,
        )

    def bind(self, kv_caches: list[torch.Tensor]) -> tuple[AttentionSpec, ...]:
        """Attach one KV tensor per layer; returns the distinct specs of the layers, for the backend that `attend_with`
        is given next. Raises UnsupportedModelError if a forward does not pass through each layer."""
        self.kv_caches = kv_caches
        for module, kv_cache in zip(self.attention_modules, kv_caches, strict=True):
            module.register_buffer("paged_kv", kv_cache, persistent=False)
            object.__setattr__(module, "paged_backend", _CountingBackend())
        return self._probe()

    def attend_with(self, backend: AttentionBackend) -> None:
        for module in self.attention_modules:
            object.__setattr__(module, "paged_backend", backend)

    def _probe(self) -> tuple[AttentionSpec, ...]:
        """One token through the model with a backend that only counts: every layer must call it exactly once."""
        device = next(self.module.parameters()).device
        one = torch.zeros((1, 1), dtype=torch.int64, device=device)
        zero = torch.zeros(1, dtype=torch.int32, device=device)
        inputs = AttnInputs(zero, zero, zero, zero)
        with torch.no_grad(), SiblingFinder() as finder, ProductCounter() as products:
            self.forward(one, one, inputs, 1)
        self.linears = finder.siblings(self.module.parameters())
        self.num_other_products = products.count - finder.num_runs
        calls = [cast(_CountingBackend, m.paged_backend).specs for m in self.attention_modules]
        if not calls or any(len(specs) != 1 for specs in calls):
            raise UnsupportedModelError("the model does not compute its attention through the attention interface")
        return tuple(dict.fromkeys(specs[0] for specs in calls))

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        paged: AttnInputs,
        logits_to_keep: int | torch.Tensor = 0,
        hidden_layers: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """`input_ids`, `positions` `[B, L]` -> logits `[B, L', V]` of the kept positions (0 keeps all), and the hidden
        states `[B, L, D]` that `hidden_layers` index in transformers' list (0 enters the first layer).

        No cache argument is named: `use_cache=False` keeps transformers' own cache out of the way.
        """
        asked = {"output_hidden_states": True} if hidden_layers else {}
        with self.mode:
            out = self.module(
                input_ids=input_ids,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=logits_to_keep,
                paged=paged,
                **asked,
            )
        return out.logits, tuple(out.hidden_states[layer] for layer in hidden_layers)

    def close(self) -> None:
        for module in self.attention_modules:
            if hasattr(module, "paged_kv"):
                del module.paged_kv
                del module.paged_backend
        self.kv_caches, self.linears, self.mode = [], [], nullcontext()
        self.module.set_attn_implementation(self._previous_attention)  # type: ignore[operator]


class _CountingBackend(Planless):
    """Stands in for attention in the probe: right shapes, no arithmetic."""

    name = "counting"

    def __init__(self) -> None:
        self.specs: list[AttentionSpec] = []

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        inputs: AttnInputs,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        self.specs.append(spec)
        assert kv_cache.shape[2] == key.shape[1], "a layer has another number of KV heads than the configuration says"
        assert kv_cache.shape[4] == key.shape[3], "a layer has another head size than the configuration says"
        return torch.zeros_like(query.transpose(1, 2).contiguous())


def _is_attention(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Attention") and hasattr(module, "layer_idx") and hasattr(module, "scaling")


def _eos_ids(module: nn.Module, text_config: Any) -> frozenset[int]:
    generation = getattr(module, "generation_config", None)
    for source in (generation, module.config, text_config):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()
