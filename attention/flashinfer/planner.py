"""FlashInfer's FA2 split-KV schedule, recomputed on the device from the true lengths.

The FA2 kernel is told by arrays in its integer workspace which thread block computes which tile of queries against
which chunk of keys, and where the partial results go. FlashInfer fills them on the host, from host lengths. Under
run-ahead scheduling the host knows upper bounds only, and those are not good enough: the kernel strides its partial
results by the number of chunks of the *device's* length, the merge by the planned one, so with more than one query
token per row a stale plan makes rows collide. Here the same arrays are computed by static-shape tensor ops, captured
before the first layer of a step. Grid, tile size, offsets and buffers stay what the capture-time plan made them.

Written against `PrefillPlanInfo` and `PrefillSplitQOKVIndptr` (scheduler.cuh) and the paged kernel (prefill.cuh) of
FlashInfer 0.6.17 to 0.7.4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

NUM_CANDIDATES = 32
MIN_CHUNK = 128  # tokens; shorter chunks do not pay for their merge, says FlashInfer's own planner


class PlanInfo(NamedTuple):
    """FlashInfer's plan vector: sizes that a graph bakes, and byte offsets into the integer workspace."""

    padded_batch_size: int  # thread blocks per KV head
    total_num_rows: int
    total_num_rows_offset: int
    cta_tile_q: int  # rows of (query token, head of the group) pairs per tile
    request_indices_offset: int
    qo_tile_indices_offset: int
    kv_tile_indices_offset: int
    merge_indptr_offset: int
    o_indptr_offset: int
    kv_chunk_size_ptr_offset: int
    v_offset: int  # these two into the float workspace
    s_offset: int
    block_valid_mask_offset: int
    enable_cuda_graph: int
    split_kv: int


class Problem(NamedTuple):
    """What a bucket's schedule is made for."""

    rows: int
    query_len: int  # tokens per row, 1 + k
    group: int  # query heads per KV head
    page_size: int
    window: int | None  # tokens a query token sees, itself included; None = all

    def tiles(self, cta_tile_q: int) -> int:
        """Query tiles of a row."""
        return -(-self.query_len * self.group // cta_tile_q)


def cta_tile_q(packed_len: int, head_dim: int) -> int:
    """The query tile FA2 takes for `packed_len` (query token, head of the group) pairs per row, on Ampere or newer."""
    if packed_len > 64 and head_dim < 256:
        return 128
    return 64 if packed_len > 16 else 16


class Schedule:
    """The arrays of one plan, as views of the integer workspace that a graph has baked."""

    def __init__(self, info: PlanInfo, workspace: torch.Tensor, problem: Problem) -> None:
        self.info, self.problem = info, problem

        def view(offset: int, count: int) -> torch.Tensor:
            return workspace[offset : offset + 4 * count].view(torch.int32)

        blocks, rows = info.padded_batch_size, problem.rows
        self.request = view(info.request_indices_offset, blocks)  # row of each block
        self.q_tile = view(info.qo_tile_indices_offset, blocks)
        self.kv_tile = view(info.kv_tile_indices_offset, blocks)
        self.o_indptr = view(info.o_indptr_offset, rows + 1)  # where the partial results of a row begin
        self.merge_indptr = view(info.merge_indptr_offset, rows * problem.query_len + 1)  # ... of a query token
        self.chunk = view(info.kv_chunk_size_ptr_offset, 1)  # tokens, one for the whole batch
        self.valid = workspace[info.block_valid_mask_offset : info.block_valid_mask_offset + blocks]  # bool bytes

    def write(self, seq_lens: torch.Tensor) -> None:
        """Make the schedule of `seq_lens` `[rows]` (each >= query_len), on their device and without reading them."""
        info, problem = self.info, self.problem
        blocks, rows, query_len = info.padded_batch_size, problem.rows, problem.query_len
        tiles = problem.tiles(info.cta_tile_q)
        reach = self._reach(seq_lens)
        chunk = self._choose_chunk(reach)
        chunks = _ceil_div(reach, chunk)  # [rows]
        ends = (chunks * tiles).cumsum(0)
        block = torch.arange(blocks, device=seq_lens.device)
        row = torch.searchsorted(ends, block, right=True).clamp_(max=rows - 1)
        row_chunks = chunks.index_select(0, row)
        place = block - (ends - chunks * tiles).index_select(0, row)  # of the block inside its row
        valid = block < ends[-1:]
        self.request.copy_(torch.where(valid, row, 0))
        self.q_tile.copy_(torch.where(valid, place // row_chunks, 0))
        self.kv_tile.copy_(torch.where(valid, place % row_chunks, 0))
        self.valid.copy_(valid)
        self.chunk.copy_(chunk)
        self.o_indptr[1:].copy_((chunks * query_len).cumsum(0))
        self.merge_indptr[1:].copy_(chunks.repeat_interleave(query_len, output_size=rows * query_len).cumsum(0))

    def _choose_chunk(self, reach: torch.Tensor) -> torch.Tensor:
        """Tokens per chunk, the smallest of a few candidates with which the rows fit into the grid.

        A row of n tokens takes tiles * ceil(n / chunk) blocks. Less than tiles * sum(n) / blocks cannot fit; the
        longest n always does, and so does tiles * sum(n) / (blocks - tiles * rows), whatever the lengths.
        """
        blocks, problem = self.info.padded_batch_size, self.problem
        tiles = problem.tiles(self.info.cta_tile_q)
        work, spare = reach.sum() * tiles, blocks - tiles * problem.rows
        lowest, highest = _ceil_div(work, blocks), reach.max()
        if spare > 0:
            highest = torch.minimum(highest, _ceil_div(work, spare))
        part = torch.arange(NUM_CANDIDATES, device=reach.device)
        granule = -(-MIN_CHUNK // problem.page_size) * problem.page_size
        candidates = lowest + _ceil_div((highest - lowest) * part, NUM_CANDIDATES - 1)
        candidates = _ceil_div(candidates, granule) * granule  # ascending
        needed = _ceil_div(reach, candidates.unsqueeze(1)).sum(1) * tiles
        return torch.where(needed <= blocks, candidates, candidates[-1]).amin()

    def _reach(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """Keys that the blocks of each row have to visit, as the kernel counts them."""
        reach = seq_lens.to(torch.int64).clamp(min=1)
        if self.problem.window is not None:
            reach = reach.clamp(max=self.problem.window - 1 + self.info.cta_tile_q)
        return reach

    def check(self, seq_lens: torch.Tensor) -> None:
        """Assert everything the kernel relies on, for a schedule of `seq_lens`. Reads the arrays back."""
        problem, host = self.problem, {n: t.tolist() for n, t in vars(self).items() if isinstance(t, torch.Tensor)}
        tiles, chunk = problem.tiles(self.info.cta_tile_q), host["chunk"][0]
        chunks = [-(-reach // chunk) for reach in self._reach(seq_lens).tolist()]
        blocks = zip(host["request"], host["q_tile"], host["kv_tile"], host["valid"], strict=True)
        work = sorted((row, q_tile, kv_tile) for row, q_tile, kv_tile, valid in blocks if valid)
        assert work == [(r, t, c) for r, n in enumerate(chunks) for t in range(tiles) for c in range(n)], "blocks"
        starts = [0]
        for n in chunks:
            starts.append(starts[-1] + n * problem.query_len)
        assert host["o_indptr"] == starts, "o_indptr"
        merge = [s + token * n for s, n in zip(starts, chunks, strict=False) for token in range(problem.query_len)]
        assert host["merge_indptr"] == [*merge, starts[-1]], "merge_indptr"


def _ceil_div(a: torch.Tensor, b: int | torch.Tensor) -> torch.Tensor:
    return (a + (b - 1)) // b
