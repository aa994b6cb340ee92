"""What the machine has to say about a configuration: whether it can do that, device, memory, number of pages."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from graphs import check_compiler
from graphspec.models.packed_linears import check_batch_invariance, check_packing
from graphspec.records.config import EngineConfig, ResolvedConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve(config: EngineConfig, *, model_limit: int, page_bytes: int, free_bytes: int) -> ResolvedConfig:
    """Fill in what depends on the model and the machine. Raises ValueError if the KV pool cannot hold a request."""
    max_model_len = config.max_model_len or model_limit
    if max_model_len > model_limit:
        raise ValueError(f"max_model_len {max_model_len} exceeds the model's limit of {model_limit} tokens: lower it")
    k = config.num_speculative_tokens
    history_width = max_model_len + (config.depth + 1) * (1 + k) + k
    per_request = -(-max_model_len // config.page_size)
    affordable = int(free_bytes * config.kv_memory_fraction) // page_bytes
    num_pages = config.num_pages or min(config.max_num_seqs * per_request, affordable)
    if num_pages < 1:
        raise ValueError(
            f"{free_bytes >> 20} MiB of free memory and kv_memory_fraction={config.kv_memory_fraction} leave no room "
            "for a single KV page: free memory or raise the fraction"
        )
    return ResolvedConfig(
        user=config,
        max_model_len=max_model_len,
        num_pages=num_pages,
        history_width=history_width,
        table_width=-(-history_width // config.page_size),
    )


def check_machine(config: EngineConfig, device: torch.device) -> None:
    """Raise, in one sentence and before anything is loaded, if this machine cannot do what `config` asks for."""
    if config.compile:
        check_compiler(device)
    if config.pack_weights:
        check_packing(device)
    if config.batch_invariant:
        check_batch_invariance(device)


def resolve_device(name: str) -> torch.device:
    """ "auto" is CUDA where there is one. Raises ValueError for a device this build of torch cannot use."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f'unknown device "{name}": use "auto", "cpu" or "cuda"')
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError('device "cuda" is not available: install a CUDA build of torch and its driver, or use "cpu"')
    return torch.device(name)


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated on `device` now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (ValueError, OSError, AttributeError):
        return 4 << 30
