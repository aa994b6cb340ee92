"""FlashInfer's XQA decode kernel: no plan at all. It reads dense block tables and lengths on the device, so a captured
call is right for every length."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch

from attention.backend import AttentionShape, AttentionSpec
from attention.flashinfer.guards import XQA, load_flashinfer
from attention.op import KernelBackend
from attention.types import AttnInputs, Bucket

SEMAPHORE_BYTES = 8 << 20  # the kernel's share of the workspace; its counters return to zero by themselves
WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends
MAX_ROWS_PER_BLOCK = 32  # (query token, head of the group) pairs of one thread block


class XqaBackend(KernelBackend):
    """Decode steps on XQA. Every row, padding included, must have seq_len >= 1 + k."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(XQA)
        self._shape = shape
        self._flashinfer: ModuleType = load_flashinfer()
        # Zeroed, once: the semaphores start at zero. Shared with no other kernel.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
        self._masks: dict[int, torch.Tensor] = {}  # by query_len, for the largest bucket

    def plan(self, buckets: Sequence[Bucket], block_tables: torch.Tensor) -> None:
        for query_len in {bucket.query_len for bucket in buckets}:
            rows = max(bucket.rows for bucket in buckets if bucket.query_len == query_len)
            blocks = rows * self._shape.num_kv_heads * -(-query_len * self._shape.group // MAX_ROWS_PER_BLOCK)
            assert blocks * 4 <= SEMAPHORE_BYTES, f"{blocks} semaphores do not fit XQA's workspace"
            if query_len > 1:
                self._masks[query_len] = causal_mask(rows, query_len).to(self._shape.device)

    def launch(
        self, query: torch.Tensor, kv_cache: torch.Tensor, inputs: AttnInputs, spec: AttentionSpec, out: torch.Tensor
    ) -> None:
        assert spec.softcap is None, "refused at start-up"
        rows, query_len = inputs.seq_lens.shape[0], inputs.query_len
        self._flashinfer.decode.xqa_batch_decode_with_kv_cache(
            query=query,
            kv_cache=kv_cache,
            workspace_buffer=self._workspace,
            block_tables=inputs.block_tables,
            seq_lens=inputs.seq_lens,
            max_seq_len=self._shape.longest,
            bmm1_scale=spec.scale,
            bmm2_scale=1.0,
            window_left=-1 if spec.window is None else spec.window - 1,
            out=out.view(rows, query_len, *out.shape[1:]) if query_len > 1 else out,
            kv_layout="HND",
            enable_pdl=False,  # the lengths are written by the graph's own earlier kernels
            q_len_per_req=query_len,
            mask=self._masks[query_len][:rows] if query_len > 1 else None,
        )


def causal_mask(rows: int, query_len: int) -> torch.Tensor:
    """The draft mask XQA takes, `[rows, query_len, 2 * ceil(query_len / 32)]` uint16 on the CPU: bit j of the 32-bit
    words of row i says that new token i sees new token j."""
    words = -(-query_len // 32)
    bits = np.tril(np.ones((query_len, 32 * words), dtype=np.uint8))
    packed = np.packbits(bits, axis=1, bitorder="little").view(np.uint16)  # [query_len, 2 * words]
    return torch.from_numpy(np.ascontiguousarray(np.broadcast_to(packed, (rows, *packed.shape))))
