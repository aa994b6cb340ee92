"""Where keys and values live: the pages of a model, and which place of them a token position is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attention import (
    AttentionBackend,
    AttentionShape,
    AttentionSpec,
    AttnInputs,
    KVLayout,
    allocate_kv_cache,
    read_lines,
)
from attention import create_backend as create_attention
from graphspec.models.paged_model import PagedModel
from graphspec.records.config import ResolvedConfig


@dataclass(frozen=True)
class Paging:
    """From token positions to places in pages. The same for every model that shares the block tables."""

    page_size: int
    scratch_page: int
    max_model_len: int

    def slot_mapping(self, block_tables: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where the K/V of `positions` `[R, Q]` go. Past the maximal length they go to the scratch page: sequence
        lengths are never clamped, since that would shift the causal diagonal of the certain token too."""
        pages = block_tables.gather(1, positions // self.page_size).to(torch.int64)
        pages = torch.where(positions < self.max_model_len, pages, self.scratch_page)
        return pages * self.page_size + positions % self.page_size

    def decode_inputs(self, block_tables: torch.Tensor, positions: torch.Tensor) -> AttnInputs:
        """What attention is given for rows of equally many tokens, at successive `positions` `[R, Q]`."""
        rows, width = positions.shape
        return AttnInputs(
            block_tables=block_tables,
            seq_lens=(positions[:, -1] + 1).to(torch.int32),
            query_start=torch.arange(0, (rows + 1) * width, width, dtype=torch.int32, device=positions.device),
            slot_mapping=self.slot_mapping(block_tables, positions).flatten(),
            query_len=width,
        )


def attach_kv(model: PagedModel, config: ResolvedConfig, device: torch.device) -> AttentionBackend:
    """Give `model` its KV cache and the attention backend that the configuration asks for, and return the backend."""
    user = config.user
    specs = model.bind(allocate_kv_cache(kv_layout(model, user.page_size, config.num_pages), device))
    shape = attention_shape(model, config, device, specs)
    lines = read_lines(user.attention_table)
    name = "cpu_native" if user.batch_invariant else user.attention_backend
    backend = create_attention(name, shape, lines=lines, in_flight=user.depth + 2)
    model.attend_with(backend)
    return backend


def kv_layout(model: PagedModel, page_size: int, num_pages: int) -> KVLayout:
    """The KV cache of `num_pages` pages and the scratch page behind them."""
    facts = model.facts
    return KVLayout(facts.num_layers, num_pages + 1, page_size, facts.num_kv_heads, facts.head_dim, facts.dtype)


def attention_shape(
    model: PagedModel, config: ResolvedConfig, device: torch.device, specs: tuple[AttentionSpec, ...]
) -> AttentionShape:
    """What an attention backend is asked for."""
    facts = model.facts
    return AttentionShape(
        num_heads=facts.num_heads,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        page_size=config.user.page_size,
        table_width=config.table_width,
        dtype=facts.dtype,
        device=device,
        specs=specs,
    )
