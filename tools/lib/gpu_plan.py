"""What `gpu_check.py` runs on: model shapes, and their sizes on a GPU or in small."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "Qwen3-8B": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "tie_word_embeddings": True,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What to check: on a GPU, or in small on the CPU."""

    device: torch.device
    dtype: torch.dtype
    models: tuple[str, ...]
    rows: tuple[int, ...]
    drafts: tuple[int, ...]
    max_model_len: int
    steps: int
    compile: bool
