"""FlashInfer without a GPU: its real planner behind a fake CUDA runtime, and its real wrappers driven up to the launch.

`emulate` does what the FA2 kernel and its merge do with the arrays of a plan. It is our reading of the kernel
(prefill.cuh, cascade.cuh, FlashInfer 0.6.17 to 0.7.4); that the reading is right only a GPU can show.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from attention.flashinfer.planner import PlanInfo, Problem, Schedule

SOURCES = Path(__file__).parent / "flashinfer_cpu"
WORKSPACE = 1 << 20


def why_not() -> str | None:
    """Why the tests of this folder cannot run here, None if they can."""
    if importlib.util.find_spec("flashinfer") is None or importlib.util.find_spec("tvm_ffi") is None:
        return "needs flashinfer-python and apache-tvm-ffi (make test installs them where nvcc is)"
    return None if shutil.which("nvcc") else "needs nvcc to build FlashInfer's planner"


def flashinfer_data(root: Path | None = None) -> Path:
    """The headers of the installed FlashInfer, or of an unpacked wheel."""
    if root is None:
        spec = importlib.util.find_spec("flashinfer")
        assert spec is not None
        assert spec.origin is not None
        root = Path(spec.origin).parent
    return root / "data"


def build_planner(data: Path, folder: Path) -> Path:
    """Compile FlashInfer's planner (scheduler.cuh) and the fake runtime into one library; kept in `folder`."""
    library = folder / "libplanner.so"
    with FileLock(folder / "libplanner.lock"):  # tests may run in several processes
        if library.exists():
            return library
        scheduler = (data / "include/flashinfer/attention/scheduler.cuh").read_text(encoding="utf-8")
        cccl = [data / "cccl" / part for part in ("libcudacxx/include", "cub", "thrust")]
        command = ["nvcc", "-std=c++17", "-O1", "-shared", "-Xcompiler", "-fPIC", "-cudart", "none"]
        command += ["-gencode", "arch=compute_90a,code=sm_90a", f"-I{data / 'include'}", *(f"-I{p}" for p in cccl)]
        command += ["-DFIXED_UNIFORM_Q_LEN"] if "bool fixed_uniform_q_len, cudaStream_t" in scheduler else []
        partial = library.with_suffix(".partial.so")
        subprocess.run(
            [*command, *map(str, (SOURCES / "planner.cu", SOURCES / "fake_runtime.cc")), "-o", str(partial)], check=True
        )
        partial.rename(library)
    return library


class HostPlanner:
    """FlashInfer's C++ planner for a device of 132 SMs of compute capability 9.0."""

    def __init__(self, library: Path) -> None:
        self._plan = ctypes.CDLL(str(library)).graphspec_prefill_plan

    def __call__(
        self,
        float_workspace: torch.Tensor,
        int_workspace: torch.Tensor,
        pinned_workspace: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_lens: torch.Tensor,
        total_num_rows: int,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        page_size: int,
        enable_cuda_graph: bool,
        head_dim_qk: int,
        head_dim_vo: int,
        causal: bool,
        window_left: int,
        fixed_split_size: int,
        disable_split_kv: bool,
        num_colocated_ctas: int,
        uniform_q_len: int = 0,
        fixed_uniform_q_len: bool = False,
        *rest: Any,
    ) -> list[int]:
        """The arguments of FlashInfer's compiled `plan`; raises RuntimeError with the planner's own message."""
        numbers = [total_num_rows, batch_size, num_qo_heads, num_kv_heads, head_dim_vo, page_size, enable_cuda_graph]
        numbers += [window_left, fixed_split_size, disable_split_kv, uniform_q_len, fixed_uniform_q_len]
        out, message = (ctypes.c_int64 * 16)(), ctypes.create_string_buffer(500)
        tensors = (float_workspace, int_workspace, pinned_workspace, qo_indptr, kv_indptr)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
        sizes = (ctypes.c_int64 * 2)(float_workspace.numel(), int_workspace.numel())
        count = self._plan(*pointers, sizes, (ctypes.c_int64 * 12)(*map(int, numbers)), out, message)
        if count < 0:
            raise RuntimeError(message.value.decode())
        return list(out[:count])


@dataclass(frozen=True)
class Heads:
    """The attention geometry of a plan."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128


def host_plan(
    planner: HostPlanner, lens: list[int], problem: Problem, heads: Heads | None = None, **options: Any
) -> Schedule:
    """A plan in graph mode, made for `lens`, in a workspace that held rubbish."""
    heads = heads or Heads(num_heads=8 * problem.group)
    rows, query_len, page = problem.rows, problem.query_len, problem.page_size
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8)
    pages = torch.tensor([0] + [-(-n // page) for n in lens], dtype=torch.int32).cumsum(0).to(torch.int32)
    info = planner(
        torch.empty(1 << 30, dtype=torch.uint8),  # never touched
        workspace,
        torch.full((WORKSPACE,), 0xAB, dtype=torch.uint8),
        torch.arange(rows + 1, dtype=torch.int32) * query_len,
        pages,
        torch.tensor(lens, dtype=torch.int32),
        rows * query_len,
        rows,
        heads.num_heads,
        heads.num_kv_heads,
        page,
        True,
        heads.head_dim,
        heads.head_dim,
        query_len > 1,
        -1 if problem.window is None else problem.window - 1,
        options.get("fixed_split_size", -1),
        options.get("disable_split_kv", False),
        0,
        query_len if query_len > 1 else 0,
    )
    return Schedule(PlanInfo(*info), workspace, problem)


class Emulation:
    """One KV head of the FA2 kernel on a schedule and the lengths the device has, `query` `[rows, q, group, D]`, `key`
    and `value` `[rows, longest, D]`."""

    def __init__(
        self, schedule: Schedule, seq_lens: list[int], scale: float = 1.0, softcap: float | None = None
    ) -> None:
        self.schedule, self.seq_lens, self.scale, self.softcap = schedule, seq_lens, scale, softcap
        self.writes = torch.zeros(0, dtype=torch.int64)  # how often each partial result was written

    def run(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`[rows, q, group, D]`; places that nothing was written to are NaN."""
        schedule, (rows, query_len, group, dim) = self.schedule, query.shape
        split = bool(schedule.info.split_kv)
        o_indptr, request = schedule.o_indptr.tolist(), schedule.request.tolist()
        size = rows * query_len * (64 if split else 1)
        partial = query.new_full((size, group, dim), float("nan"))
        lse = query.new_full((size, group), float("nan"))
        self.writes = torch.zeros(size, dtype=torch.int64)
        masked = split or schedule.info.block_valid_mask_offset > 0  # without a mask every block of the grid runs
        valid = schedule.valid.tolist() if masked else [1] * schedule.info.padded_batch_size
        done: set[tuple[int, int, int]] = set()
        q_tile, kv_tile = schedule.q_tile.tolist(), schedule.kv_tile.tolist()
        for block in range(schedule.info.padded_batch_size):
            if not valid[block]:
                continue
            row = request[block]
            assert 0 <= row < rows, f"block {block} works on row {row}"
            if (work := (row, q_tile[block], kv_tile[block])) in done and not split:
                continue  # the same numbers to the same place
            done.add(work)
            tokens, places = self._block(row, q_tile[block], kv_tile[block], query, key, value)
            out, weight, token, head = tokens
            target = torch.tensor([o_indptr[row] + p for p in places])
            partial[target, head], lse[target, head] = out, weight
            self.writes.index_add_(0, target[head == 0], torch.ones_like(token[head == 0]))
        return self._merge(partial, lse, rows * query_len, split).view(query.shape)

    def _block(
        self, row: int, q_tile: int, kv_tile: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], list[int]]:
        """The partial results of one block and where they go, relative to the row."""
        info, problem, kv_len = self.schedule.info, self.schedule.problem, self.seq_lens[row]
        tile, group, query_len, split = info.cta_tile_q, problem.group, problem.query_len, bool(info.split_kv)
        window_left = kv_len if problem.window is None else problem.window - 1
        start = max(0, kv_len + q_tile * tile // group - (query_len + window_left))
        chunk = int(self.schedule.chunk) & 0xFFFFFFFF
        first = min(kv_tile * chunk + start, kv_len) if split else start
        last = min((kv_tile + 1) * chunk + start, kv_len) if split else kv_len
        packed = torch.arange(q_tile * tile, min((q_tile + 1) * tile, query_len * group))
        token, head = packed // group, packed % group
        place = kv_len - query_len + token.unsqueeze(1)  # absolute positions of the query tokens
        position = torch.arange(first, last)
        hidden = (position > place) | (position < place - window_left)
        scores = query[row, token, head] @ key[row, first:last].T * self.scale
        if self.softcap:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.masked_fill(hidden, float("-inf"))
        weight = scores.logsumexp(-1) if last > first else torch.full((len(packed),), float("-inf"))
        out = torch.exp(scores - weight.clamp(min=-1e30).unsqueeze(1)) @ value[row, first:last]
        num_chunks = -(-min(max(kv_len, 1), window_left + tile) // chunk) if split else 1
        places = [t * num_chunks + kv_tile if split else t for t in token.tolist()]
        return (out, weight, token, head), places

    def _merge(self, partial: torch.Tensor, lse: torch.Tensor, count: int, split: bool) -> torch.Tensor:
        if not split:
            return partial[:count]
        out = partial.new_zeros((count, *partial.shape[1:]))
        bounds = self.schedule.merge_indptr.tolist()
        for i in range(count):
            weights = torch.exp(lse[bounds[i] : bounds[i + 1]] - lse[bounds[i] : bounds[i + 1]].amax(0))
            out[i] = (weights.unsqueeze(-1) * partial[bounds[i] : bounds[i + 1]]).sum(0) / weights.sum(0).unsqueeze(-1)
        return out


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lens: list[int], window: int | None) -> Any:
    """Textbook attention of the same tensors in float64."""
    query_len = query.shape[1]
    out = torch.zeros(query.shape, dtype=torch.float64)
    for row, n in enumerate(lens):
        place, position = torch.arange(n - query_len, n).view(-1, 1), torch.arange(n)
        hidden = (position > place) | (place - position >= (window or n))
        scores = torch.einsum("qgd,kd->qgk", query[row].double(), key[row, :n].double())
        out[row] = scores.masked_fill(hidden.unsqueeze(1), float("-inf")).softmax(-1) @ value[row, :n].double()
    return out
