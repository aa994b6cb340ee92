"""Attention of one layer as a captured graph over static inputs that are filled anew before a replay."""

from __future__ import annotations

from functools import partial

import torch

from attention import (
    AttentionBackend,
    AttentionShape,
    AttnInputs,
    Bucket,
    KVLayout,
    ReferenceBackend,
    allocate_kv_cache,
)
from graphs import CapturedGraph, PersistentBuffers, capture
from graphs import create_backend as create_graphs


class AttentionStep:
    """`rows` rows of `query_len` new tokens each, on pages in random order, for lengths up to what the tables hold."""

    def __init__(self, shape: AttentionShape, backend: AttentionBackend, rows: int, query_len: int) -> None:
        self.shape, self.rows, self.query_len, device = shape, rows, query_len, shape.device
        width = shape.table_width
        layout = KVLayout(1, rows * width, shape.page_size, shape.num_kv_heads, shape.head_dim, shape.dtype)
        self.kv_cache = allocate_kv_cache(layout, device)[0].normal_()
        self.query = torch.randn(rows, shape.num_heads, query_len, shape.head_dim, dtype=shape.dtype, device=device)
        self.key, self.value = (
            torch.randn(rows, shape.num_kv_heads, query_len, shape.head_dim, dtype=shape.dtype, device=device)
            for _ in range(2)
        )
        self.inputs = AttnInputs(
            block_tables=torch.randperm(rows * width, device=device).view(rows, width).to(torch.int32),
            seq_lens=torch.zeros(rows, dtype=torch.int32, device=device),
            query_start=torch.arange(rows + 1, dtype=torch.int32, device=device) * query_len,
            slot_mapping=torch.zeros(rows * query_len, dtype=torch.int64, device=device),
            query_len=query_len,
        )
        self.set_lengths(torch.full((rows,), query_len))
        backend.plan([Bucket(rows, query_len)], self.inputs.block_tables)
        buffers = PersistentBuffers()
        for name in ("kv_cache", "query", "key", "value"):
            buffers.add(name, getattr(self, name), writer="fill")
        for name in ("block_tables", "seq_lens", "query_start", "slot_mapping"):
            buffers.add(name, getattr(self.inputs, name), writer="set_lengths")
        for name, tensor in backend.buffers().items():
            buffers.add(f"backend.{name}", tensor, writer="step")
        run = partial(self.attend, backend, self.query, self.key, self.value, self.kv_cache)
        self.graph: CapturedGraph = capture(run, buffers, key=(rows, query_len), backend=create_graphs(device))

    def set_lengths(self, lengths: torch.Tensor) -> None:
        """The true lengths of the rows, the new tokens included."""
        tables, size = self.inputs.block_tables, self.shape.page_size
        lengths = lengths.to(tables.device, torch.int64)
        places = lengths.unsqueeze(1) - self.query_len + torch.arange(self.query_len, device=tables.device)
        slots = tables.gather(1, places // size).to(torch.int64) * size + places % size
        self.inputs.seq_lens.copy_(lengths)
        self.inputs.slot_mapping.copy_(slots.flatten())

    def fill(self, longest: int) -> None:
        """New lengths up to `longest`, new contents."""
        lengths = torch.randint(self.query_len, longest + 1, (self.rows,))
        lengths[0] = longest
        self.set_lengths(lengths)
        for tensor in (self.kv_cache, self.query, self.key, self.value):
            tensor.normal_()

    def attend(
        self, backend: AttentionBackend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        backend.prepare(self.inputs)
        return backend.attend(query, key, value, kv, self.inputs, self.shape.specs[0])

    def error(self, longest: int) -> float:
        """Largest error of a replay on new inputs, as a share of the largest value; NaN if anything is NaN."""
        self.fill(longest)
        exact = [t.float() for t in (self.query, self.key, self.value, self.kv_cache)]
        expected = self.attend(ReferenceBackend(), *exact)
        out = self.graph.replay()
        assert isinstance(out, torch.Tensor)
        return float((out.float() - expected).abs().max() / expected.abs().max())
