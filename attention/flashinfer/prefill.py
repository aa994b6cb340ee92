"""Prompt chunks on FlashInfer's paged prefill wrapper, planned on the host: their lengths are exact there."""

from __future__ import annotations

from typing import Any

import torch

from attention.backend import AttentionShape, AttentionSpec
from attention.flashinfer.guards import Machine, load_flashinfer
from attention.op import KernelBackend
from attention.types import AttnInputs

INT_WORKSPACE_BYTES = 8 << 20  # FlashInfer's own default
MAX_TILE = 128


class Fa2Prefill(KernelBackend):
    """Packed chunks on FA2.

    A plan is staged in a pinned workspace that the device reads later, so plans take turns on `in_flight` sets of
    workspaces: as many as there can be launches whose copies have not run yet.
    """

    def __init__(self, shape: AttentionShape, machine: Machine, in_flight: int) -> None:
        super().__init__("flashinfer_prefill")
        self._shape = shape
        flashinfer: Any = load_flashinfer()
        packed_rows = (
            2 * machine.num_sms // shape.num_kv_heads * MAX_TILE
        )  # of a split plan; others need no float workspace
        size = shape.num_heads * packed_rows * (shape.head_dim + 1) * 4 + 64
        shared = torch.zeros(size, dtype=torch.uint8, device=shape.device)  # stream order keeps the launches apart
        self._turns = [
            {
                spec: flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper(
                    float_workspace_buffer=shared, kv_layout="HND", backend="fa2"
                )
                for spec in shape.specs
            }
            for _ in range(in_flight)
        ]
        for wrapper in (wrapper for turn in self._turns for wrapper in turn.values()):
            ints = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
            wrapper.reset_workspace_buffer(float_workspace_buffer=shared, int_workspace_buffer=ints)
        self._turn = 0

    def plan_prefill(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start: torch.Tensor) -> None:
        self._turn = (self._turn + 1) % len(self._turns)
        shape = self._shape
        pages = -(-seq_lens // shape.page_size)
        indptr = torch.zeros(len(pages) + 1, dtype=torch.int32)
        indptr[1:] = pages.cumsum(0)
        used = torch.arange(block_tables.shape[1]) < pages.unsqueeze(1)
        for spec, wrapper in self._turns[self._turn].items():
            wrapper.plan(
                qo_indptr=query_start,
                paged_kv_indptr=indptr,
                paged_kv_indices=block_tables[used],
                paged_kv_last_page_len=seq_lens - (pages - 1) * shape.page_size,
                num_qo_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim_qk=shape.head_dim,
                page_size=shape.page_size,
                causal=True,
                window_left=-1 if spec.window is None else spec.window - 1,
                logits_soft_cap=spec.softcap,
                sm_scale=spec.scale,
                q_data_type=shape.dtype,
                kv_data_type=shape.dtype,
                seq_lens=seq_lens,
            )

    def launch(
        self, query: torch.Tensor, kv_cache: torch.Tensor, inputs: AttnInputs, spec: AttentionSpec, out: torch.Tensor
    ) -> None:
        wrapper = self._turns[self._turn][spec]
        wrapper.run(q=query, paged_kv_cache=kv_cache, out=out, enable_pdl=False)
