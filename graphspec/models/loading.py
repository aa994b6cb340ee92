"""Loads the target and the draft model, and refuses in one sentence what cannot be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from graphspec.models.builtin import NAME as BUILTIN_NAME
from graphspec.models.builtin import builtin_model_path
from graphspec.models.paged_model import ATTENTION_NAME, PagedModel, UnsupportedModelError, check_config
from graphspec.records.config import EngineConfig


def model_path(name: str) -> str:
    """A local folder or hub id for `name`; the built-in model is unpacked on first use.

    Raises ValueError if `name` is a local folder that holds no model.
    """
    if name == BUILTIN_NAME:
        return str(builtin_model_path())
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").exists():
        raise ValueError(f'"{name}" is no model folder: it has no config.json; name a folder in Hugging Face layout')
    return name


def load_module(name: str, dtype: torch.dtype | None, device: torch.device) -> nn.Module:
    """The transformers model at `name` (see `model_path`), in `dtype` (None: the checkpoint's) on `device`.

    Raises ValueError, in one sentence, for a missing or corrupt checkpoint and `UnsupportedModelError` for a model
    this engine cannot run.
    """
    path = model_path(name)
    try:
        check_config(AutoConfig.from_pretrained(path))
        module, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype or "auto", attn_implementation=ATTENTION_NAME, output_loading_info=True
        )
    except UnsupportedModelError:
        raise
    except Exception as caught:
        what = str(caught).strip().splitlines()
        reason = what[0] if what else type(caught).__name__
        raise ValueError(
            f'cannot load a causal language model from "{name}": {reason}; '
            f'name "{BUILTIN_NAME}", a complete local folder or a hub id'
        ) from caught
    if info["missing_keys"] or info["mismatched_keys"]:
        keys = sorted(str(key) for key in (*info["missing_keys"], *info["mismatched_keys"]))
        raise ValueError(f'the checkpoint "{name}" is incomplete: no usable weights for {keys[0]} ({len(keys)} in all)')
    return cast(nn.Module, module.eval().requires_grad_(False).to(device))


def draft_module(config: EngineConfig, target: nn.Module, given: nn.Module | None) -> nn.Module | None:
    """The module that drafts for `target`: `given`, or the one that `config` names, in the target's dtype and on its
    device; None if another drafter does. Raises ValueError for choices that do not fit together."""
    wanted = config.draft_model is not None or given is not None
    others = config.draft_model is not None or config.ngram_pool or config.drafter not in ("auto", "draft_model")
    if given is not None and others:
        raise ValueError(
            "a draft model was passed to the engine, and its configuration names another drafter: drop one"
        )
    if config.num_speculative_tokens == 0:
        return None
    if config.drafter == "draft_model" and not wanted:
        raise ValueError('drafter "draft_model" needs a model: set draft_model to a name, or pass a module to Engine')
    if config.draft_model is None:
        return given
    weight = next(target.parameters())
    return load_module(config.draft_model, weight.dtype, weight.device)


def open_draft(module: nn.Module, target: PagedModel, shared_ids: int | None = None) -> PagedModel:
    """`module`, to draft for `target`. `shared_ids` says how many ids their tokenizers are known to agree on; then the
    two vocabularies may be padded to different sizes behind them. None: only their sizes can be compared.

    Raises ValueError if the two do not go together or `module` is not supported.
    """
    if {id(m) for m in module.modules()} & {id(m) for m in target.attention_modules}:
        raise ValueError("the draft model is the model itself: load a second one, or leave it out to draft by n-grams")
    try:
        draft = PagedModel(module)
    except UnsupportedModelError as reason:
        raise UnsupportedModelError(f"the draft model cannot be used: {reason}") from reason
    ours, theirs = target.facts.vocab_size, draft.facts.vocab_size
    if ours == theirs or (shared_ids is not None and shared_ids <= min(ours, theirs)):
        return draft
    draft.close()
    raise ValueError(
        f"the draft model has a vocabulary of {theirs} tokens and the model one of {ours}"
        + ("" if shared_ids is None else f", and their tokenizer {shared_ids}")
        + ": use a draft model with the same tokenizer"
    )
