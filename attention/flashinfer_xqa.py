"""FlashInfer's XQA decode kernel: no plan at all. It reads dense block tables and lengths on the device, so a captured
call is right for every length."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch

from attention.backend import AttentionShape, AttentionSpec, Planless
from attention.flashinfer_guards import XQA, load_flashinfer
from attention.kv_cache import store_kv
from attention.op import OwnedOp
from attention.types import AttnInputs, Bucket

SEMAPHORE_BYTES = 8 << 20  # the kernel's share of the workspace; its counters return to zero by themselves
WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends
MAX_ROWS_PER_BLOCK = 32  # (query token, head of the group) pairs of one thread block


class XqaBackend(Planless):
    """Decode steps on XQA. Every row, padding included, must have seq_len >= 1 + k."""

    name = XQA

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._flashinfer: ModuleType = load_flashinfer()
        # Zeroed, once: the semaphores start at zero. Shared with no other kernel.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
        self._masks: dict[int, torch.Tensor] = {}  # by query_len, for the largest bucket
        self._op = OwnedOp(XQA, self._run)

    def plan(self, buckets: Sequence[Bucket], block_tables: torch.Tensor) -> None:
        for query_len in {bucket.query_len for bucket in buckets}:
            rows = max(bucket.rows for bucket in buckets if bucket.query_len == query_len)
            blocks = rows * self._shape.num_kv_heads * -(-query_len * self._shape.group // MAX_ROWS_PER_BLOCK)
            assert blocks * 4 <= SEMAPHORE_BYTES, f"{blocks} semaphores do not fit XQA's workspace"
            if query_len > 1:
                self._masks[query_len] = causal_mask(rows, query_len).to(self._shape.device)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        inputs: AttnInputs,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        out: torch.Tensor = self._op.overload(query, key, value, kv_cache, *inputs, *spec)
        return out

    def _run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start: torch.Tensor,
        slot_mapping: torch.Tensor,
        query_len: int,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        assert softcap is None, "refused at start-up"
        store_kv(kv_cache, key, value, slot_mapping)
        rows, heads, _, head_dim = query.shape
        out = torch.empty((rows, query_len, heads, head_dim), dtype=query.dtype, device=query.device)
        self._flashinfer.decode.xqa_batch_decode_with_kv_cache(
            query=query.transpose(1, 2).reshape(rows * query_len, heads, head_dim),
            kv_cache=kv_cache,
            workspace_buffer=self._workspace,
            block_tables=block_tables,
            seq_lens=seq_lens,
            max_seq_len=self._shape.longest,
            bmm1_scale=scale,
            bmm2_scale=1.0,
            window_left=-1 if window is None else window - 1,
            out=out if query_len > 1 else out.squeeze(1),
            kv_layout="HND",
            enable_pdl=False,  # the lengths are written by the graph's own earlier kernels
            q_len_per_req=query_len,
            mask=self._masks[query_len][:rows] if query_len > 1 else None,
        )
        return out


def causal_mask(rows: int, query_len: int) -> torch.Tensor:
    """The draft mask XQA takes, `[rows, query_len, 2 * ceil(query_len / 32)]` uint16 on the CPU: bit j of the 32-bit
    words of row i says that new token i sees new token j."""
    words = -(-query_len // 32)
    bits = np.tril(np.ones((query_len, 32 * words), dtype=np.uint8))
    packed = np.packbits(bits, axis=1, bitorder="little").view(np.uint16)  # [query_len, 2 * words]
    return torch.from_numpy(np.ascontiguousarray(np.broadcast_to(packed, (rows, *packed.shape))))
