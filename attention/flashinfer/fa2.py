"""FlashInfer's FA2 kernel for decode steps, planned once before capture.

Without a split of the keys the plan does not depend on lengths at all: right for every length, and fast once rows times
KV heads fill the device. With a split, `planner.Schedule` recomputes the schedule on the device in every step.

Two tricks make the host unnecessary. `paged_kv_indices` is the dense block table itself: `indptr` is the constant 0, P,
2P, ... And `last_page_len` is seq_len - (P - 1) * page_size, negative for short rows: the kernel adds
(P - 1) * page_size to it in 32 bits, which gives seq_len again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attention.backend import AttentionShape, AttentionSpec
from attention.flashinfer.guards import FA2, FA2_SPLIT, Machine, load_flashinfer, parse_plan
from attention.flashinfer.planner import PlanInfo, Problem, Schedule
from attention.op import KernelBackend
from attention.types import AttnInputs, Bucket

INT_WORKSPACE_BYTES = 256 << 10  # of one plan; FlashInfer raises if it does not suffice
MAX_TILE = 128  # rows of FA2's largest query tile


@dataclass(frozen=True, eq=False)
class _Planned:
    """One bucket and spec: a wrapper that was planned once, and its schedule where the keys are split."""

    wrapper: Any
    info: PlanInfo
    schedule: Schedule | None
    int_workspace: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Bucket:
    last_page_len: torch.Tensor  # [rows] int32
    block_tables: torch.Tensor  # [rows, P] int32, the leading rows of the static tensor
    plans: dict[AttentionSpec, _Planned]


class Fa2Backend(KernelBackend):
    """Decode steps on FA2, with or without a split of the keys."""

    def __init__(self, shape: AttentionShape, machine: Machine, *, split: bool) -> None:
        super().__init__(FA2_SPLIT if split else FA2)
        self._shape, self._machine, self._split = shape, machine, split
        self._flashinfer: Any = load_flashinfer()
        self._buckets: dict[Bucket, _Bucket] = {}

    def plan(self, buckets: Sequence[Bucket], block_tables: torch.Tensor) -> None:
        # Offsets into the float workspace do not depend on its size: plan with more than enough, keep what is needed.
        ample = torch.empty(self._ample_bytes(buckets), dtype=torch.uint8, device=self._shape.device)
        for bucket in buckets:
            self._buckets[bucket] = self._plan_bucket(bucket, block_tables[: bucket.rows], ample)
        plans = [planned for bucket in self._buckets.values() for planned in bucket.plans.values()]
        need = max((float_bytes(planned.info, self._shape.num_heads) for planned in plans), default=0)
        shared = torch.zeros(max(need, 16), dtype=torch.uint8, device=self._shape.device)  # one step runs at a time
        for planned in plans:
            planned.wrapper.reset_workspace_buffer(
                float_workspace_buffer=shared, int_workspace_buffer=planned.int_workspace
            )

    def buffers(self) -> Mapping[str, torch.Tensor]:
        found = {}
        for (rows, query_len), bucket in self._buckets.items():
            where = f"{self.name}.{rows}x{query_len}"
            found[f"{where}.last_page_len"] = bucket.last_page_len
            scheduled = [planned for planned in bucket.plans.values() if planned.schedule is not None]
            found.update({f"{where}.schedule{i}": planned.int_workspace for i, planned in enumerate(scheduled)})
        return found

    def prepare(self, inputs: AttnInputs) -> None:
        bucket = self._buckets[Bucket(inputs.seq_lens.shape[0], inputs.query_len)]
        same = inputs.block_tables.data_ptr() == bucket.block_tables.data_ptr()
        assert same, "FA2 reads the static block tables that it was planned with, whatever a step brings"
        bucket.last_page_len.copy_(inputs.seq_lens - (self._shape.longest - self._shape.page_size))
        for planned in bucket.plans.values():
            if planned.schedule is not None:
                planned.schedule.write(inputs.seq_lens)

    def launch(
        self, query: torch.Tensor, kv_cache: torch.Tensor, inputs: AttnInputs, spec: AttentionSpec, out: torch.Tensor
    ) -> None:
        bucket = self._buckets[Bucket(inputs.seq_lens.shape[0], inputs.query_len)]
        # Without PDL: the kernel reads its schedule before it waits for the kernels that wrote it.
        bucket.plans[spec].wrapper.run(q=query, paged_kv_cache=kv_cache, out=out, enable_pdl=False)

    def _plan_bucket(self, bucket: Bucket, block_tables: torch.Tensor, ample: torch.Tensor) -> _Bucket:
        last_page_len = torch.full((bucket.rows,), self._shape.page_size, dtype=torch.int32, device=self._shape.device)
        plans = {spec: self._plan_spec(bucket, spec, block_tables, last_page_len, ample) for spec in self._shape.specs}
        return _Bucket(last_page_len, block_tables, plans)

    def _plan_spec(
        self,
        bucket: Bucket,
        spec: AttentionSpec,
        block_tables: torch.Tensor,
        last_page_len: torch.Tensor,
        ample: torch.Tensor,
    ) -> _Planned:
        """Plan for the longest lengths there can be; which ones does not matter for what a graph bakes."""
        shape, rows = self._shape, bucket.rows
        indptr = torch.arange(rows + 1, dtype=torch.int32) * shape.table_width
        int_workspace = torch.zeros(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
        wrapper = self._flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer=ample,
            kv_layout="HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr.to(shape.device),
            paged_kv_indices_buffer=block_tables.view(-1),
            paged_kv_last_page_len_buffer=last_page_len,
            backend="fa2",
        )
        wrapper.reset_workspace_buffer(float_workspace_buffer=ample, int_workspace_buffer=int_workspace)
        # Before 0.7.4 the tail of the grid of a plan without split works on whatever this buffer held. From zeros it
        # repeats the first tile: a waste, and the same numbers to the same place.
        wrapper._pin_memory_int_workspace_buffer.zero_()
        wrapper.plan(
            indptr=indptr,
            indices=block_tables.view(-1),
            last_page_len=torch.full((rows,), shape.page_size, dtype=torch.int32),
            num_qo_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            page_size=shape.page_size,
            window_left=-1 if spec.window is None else spec.window - 1,
            logits_soft_cap=spec.softcap,
            sm_scale=spec.scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            disable_split_kv=not self._split,
            q_len_per_req=bucket.query_len,
        )
        info = parse_plan(wrapper._plan_info, split=self._split)
        schedule = Schedule(info, int_workspace, Problem(*bucket, shape.group, shape.page_size, spec.window))
        self._check(schedule)
        return _Planned(wrapper, info, schedule if info.split_kv else None, int_workspace)

    def _check(self, schedule: Schedule) -> None:
        """Once per plan, at start-up: what the host planned obeys the rules that the device's schedule follows, and
        the device's schedule of the same lengths obeys them too."""
        rows = schedule.problem.rows
        if not schedule.info.split_kv:
            assert int(schedule.request.max()) < rows, "blocks past the real tiles work on rows that are not there"
            return
        longest = torch.full((rows,), self._shape.longest, dtype=torch.int32, device=self._shape.device)
        schedule.check(longest)
        schedule.write(longest)
        schedule.check(longest)

    def _ample_bytes(self, buckets: Sequence[Bucket]) -> int:
        """More float workspace than any plan of these buckets takes."""
        if not self._split:
            return 16
        shape = self._shape
        tiles = (b.rows * (b.query_len * shape.group + MAX_TILE) for b in buckets)
        packed_rows = max(2 * self._machine.num_sms // shape.num_kv_heads * MAX_TILE, *tiles)
        return shape.num_heads * packed_rows * (shape.head_dim + 1) * 4 + 64


def float_bytes(info: PlanInfo, num_heads: int) -> int:
    """Float workspace a plan uses: partial results, then their log-sum-exps."""
    return info.s_offset + num_heads * info.padded_batch_size * info.cta_tile_q * 4 if info.split_kv else 0
