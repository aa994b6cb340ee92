"""FlashInfer's real Python on the CPU: its wrappers plan with its real planner, and where they would launch a kernel,
the kernel is emulated from the very arguments it would get."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_fa2 import Emulation, HostPlanner

from attention.flashinfer.planner import PlanInfo, Problem, Schedule

HND, CAUSAL, NON_CAUSAL = 1, 1, 0  # FlashInfer's enums

# The leading arguments of the compiled `paged_run` of FA2, in order (prefill.py and decode.py of FlashInfer).
RUN_ARGUMENTS = (
    "float_workspace", "int_workspace", "plan_info", "q", "k_cache", "v_cache", "qo_indptr", "kv_indptr", "kv_indices",
    "last_page_len", "out", "lse", "mask_mode", "layout", "window_left", "enable_pdl", "custom_mask", "mask_indptr",
    "alibi_slopes", "prefix_len", "token_pos", "max_item_len", "logits_soft_cap", "sm_scale",
)  # fmt: skip
XQA_ARGUMENTS = (
    "run_sm90_fp8_mha", "sm_count", "num_kv_heads", "sliding_win_size", "q_scale", "out", "rcp_out_scale", "q", "sinks",
    "k_cache", "v_cache", "k_sf", "v_sf", "page_table", "max_seq_len", "seq_lens", "batch_size", "kv_scale",
    "semaphores", "scratch", "enable_pdl", "q_seq_len", "q_cu_seq_lens", "mask",
)  # fmt: skip


class FakeGpu:
    """Stands in for the compiled modules. `planned`, `ran` and `xqa_ran` keep the arguments of every call."""

    def __init__(self, planner: HostPlanner) -> None:
        self._planner = planner
        self.planned: list[tuple[Any, ...]] = []
        self.ran: list[dict[str, Any]] = []
        self.xqa_ran: list[dict[str, Any]] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Put this in the place of the GPU, in the modules of FlashInfer that look for one."""
        empty = torch.empty
        patch.setattr(torch, "empty", lambda *a, pin_memory=False, **kw: empty(*a, **kw))
        modules = [importlib.import_module(f"flashinfer.{name}") for name in ("decode", "prefill", "xqa")]
        fakes: dict[str, Callable[..., Any]] = {
            "get_compute_capability": lambda device: (9, 0),
            "get_device_sm_count": lambda device: 132,
            "device_support_pdl": lambda device: False,
            "_get_cache_alibi_slopes_buf": lambda *args: None,
            "get_batch_prefill_module": lambda *args: SimpleNamespace(plan=self.plan, paged_run=self.paged_run),
            "get_xqa_module": lambda *args: SimpleNamespace(xqa=self.xqa),
        }
        for module in modules:
            for name, fake in fakes.items():
                if hasattr(module, name):
                    patch.setattr(module, name, fake)

    def plan(self, *args: Any) -> list[int]:
        self.planned.append(args)
        return self._planner(*args)

    def paged_run(self, *args: Any) -> None:
        run = dict(zip(RUN_ARGUMENTS, args, strict=False))
        self.ran.append(run)
        lens = kv_lens(run)
        if run["plan_info"][13]:
            self._decode(run, lens)
        else:
            self._prefill(run, lens)

    def _decode(self, run: dict[str, Any], lens: list[int]) -> None:
        """What the kernel does in graph mode, head by head."""
        rows, kv_heads = len(lens), run["k_cache"].shape[1]
        query = run["q"].float().unflatten(0, (rows, -1)).unflatten(2, (kv_heads, -1))  # [rows, q, Hkv, g, D]
        assert run["mask_mode"] == (CAUSAL if query.shape[1] > 1 else NON_CAUSAL)
        window = None if run["window_left"] < 0 else run["window_left"] + 1
        problem = Problem(rows, query.shape[1], query.shape[3], run["k_cache"].shape[2], window)
        schedule = Schedule(PlanInfo(*run["plan_info"]), run["int_workspace"], problem)
        key, value = (gather(run, name, lens) for name in ("k_cache", "v_cache"))
        for head in range(kv_heads):
            emulation = Emulation(schedule, lens, run["sm_scale"], run["logits_soft_cap"])
            out = emulation.run(query[:, :, head], key[:, head], value[:, head])
            run["out"].unflatten(0, (rows, -1)).unflatten(2, (kv_heads, -1))[:, :, head] = out.to(run["out"].dtype)
            if schedule.info.split_kv:
                assert int(emulation.writes.max()) == 1, "a partial result is written twice"

    def _prefill(self, run: dict[str, Any], lens: list[int]) -> None:
        starts = run["qo_indptr"].tolist()
        assert run["mask_mode"] == CAUSAL
        key, value = (gather(run, name, lens) for name in ("k_cache", "v_cache"))
        for row, n in enumerate(lens):
            part = slice(starts[row], starts[row + 1])
            window = None if run["window_left"] < 0 else run["window_left"] + 1
            scale, softcap = run["sm_scale"], run["logits_soft_cap"]
            run["out"][part] = textbook(run["q"][part], key[row, :, :n], value[row, :, :n], scale, window, softcap)

    def xqa(self, *args: Any) -> None:
        run = dict(zip(XQA_ARGUMENTS, args, strict=True))
        self.xqa_ran.append(run)
        lens, query_len, kv_heads = run["seq_lens"][:, 0].tolist(), run["q_seq_len"], run["num_kv_heads"]
        assert not run["semaphores"].any()
        assert min(lens) >= query_len
        cache = {name: run[name].transpose(1, 2) for name in ("k_cache", "v_cache")}  # given as NHD
        paged = {"kv_indices": run["page_table"].flatten(), "kv_indptr": run["page_table"].shape[1], **cache}
        key, value = (gather(paged, name, lens) for name in cache)
        scale = run["q_scale"] * run["kv_scale"] / run["q"].shape[-1] ** 0.5
        for row, n in enumerate(lens):
            query, out = (run[name][row].view(query_len, -1, run["q"].shape[-1]) for name in ("q", "out"))
            out.copy_(textbook(query, key[row, :, :n], value[row, :, :n], scale, run["sliding_win_size"] or None, None))
            if query_len > 1:
                words = run["mask"][row].view(torch.int32)
                seen = torch.tensor([[(int(words[i, j // 32]) >> (j % 32)) & 1 for j in range(query_len)]
                                     for i in range(query_len)])  # fmt: skip
                assert torch.equal(seen, torch.ones_like(seen).tril())
        assert kv_heads == cache["k_cache"].shape[1]


def kv_lens(run: dict[str, Any]) -> list[int]:
    """The lengths the kernel computes: in 32 bits without sign, so a negative last page wraps to the true length."""
    page_size = run["k_cache"].shape[2]
    pairs = zip(run["kv_indptr"].diff().tolist(), run["last_page_len"].tolist(), strict=True)
    return [((pages - 1) * page_size + last) & 0xFFFFFFFF for pages, last in pairs]


def gather(run: dict[str, Any], name: str, lens: list[int]) -> torch.Tensor:
    """K or V of every row, `[rows, Hkv, longest, D]` float32, read through the page table the kernel gets."""
    cache, indptr = run[name], run["kv_indptr"]  # [pages, Hkv, page, D]
    rows, longest, page_size = len(lens), max(lens), cache.shape[2]
    starts = range(0, rows * indptr, indptr) if isinstance(indptr, int) else indptr[:-1].tolist()
    out = torch.zeros(rows, cache.shape[1], longest, cache.shape[3])
    for row, (start, n) in enumerate(zip(starts, lens, strict=True)):
        pages = run["kv_indices"][start : start + -(-n // page_size)].long()
        out[row, :, :n] = cache[pages].transpose(0, 1).flatten(1, 2)[:, :n].float()
    return out


def textbook(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None, softcap: float | None
) -> torch.Tensor:
    """Attention of the last tokens of one row: `query` `[q, Hq, D]`, `key` and `value` `[Hkv, n, D]`."""
    (query_len, heads, _), n = query.shape, key.shape[1]
    key, value = (t.repeat_interleave(heads // t.shape[0], dim=0) for t in (key, value))
    scores = torch.einsum("qhd,hkd->hqk", query.float(), key) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    place, position = torch.arange(n - query_len, n).view(-1, 1), torch.arange(n)
    hidden = (position > place) | (place - position >= (window or n))
    return torch.einsum("hqk,hkd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value).to(query.dtype)
