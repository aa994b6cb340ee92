"""What must hold before FlashInfer is used: version, signatures, shapes, and what its planner returned.

FlashInfer documents its wrappers, not what they keep inside; everything this package relies on is checked here, once,
at start-up. Written against FlashInfer 0.6.17, 0.6.18.post1 and 0.7.4.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from types import ModuleType
from typing import Any, NamedTuple

import torch

from attention.backend import AttentionShape, UnsupportedAttentionError
from attention.flashinfer.planner import PlanInfo

OLDEST = (0, 6, 17)  # q_len_per_req of the decode wrapper since 0.6.16, the fixes of XQA's loads since 0.6.17

XQA, FA2, FA2_SPLIT = "flashinfer_xqa", "flashinfer_fa2", "flashinfer_fa2_split"
NAMES = (XQA, FA2, FA2_SPLIT)

# Parameters that are passed by keyword, per function: "module:qualified name". A wrapper's `plan` may hand its keywords
# on to `_plan_impl`.
DECODE, PREFILL = "decode:BatchDecodeWithPagedKVCacheWrapper", "prefill:BatchPrefillWithPagedKVCacheWrapper"
PLAN = {"window_left", "logits_soft_cap", "sm_scale", "q_data_type", "kv_data_type", "disable_split_kv"}
SIGNATURES = {
    "decode:xqa_batch_decode_with_kv_cache": {
        "query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len", "bmm1_scale", "bmm2_scale",
        "window_left", "out", "kv_layout", "enable_pdl", "q_len_per_req", "mask",
    },
    f"{DECODE}.__init__": {
        "float_workspace_buffer", "kv_layout", "use_cuda_graph", "use_tensor_cores", "paged_kv_indptr_buffer",
        "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer", "backend",
    },
    f"{DECODE}.plan": PLAN | {
        "indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim", "page_size", "q_len_per_req",
    },
    f"{PREFILL}.__init__": {"float_workspace_buffer", "kv_layout", "backend"},
    f"{PREFILL}.plan": PLAN | {
        "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "num_qo_heads", "num_kv_heads",
        "head_dim_qk", "page_size", "causal", "seq_lens",
    },
    **{f"{wrapper}.run": {"q", "paged_kv_cache", "out", "enable_pdl"} for wrapper in (DECODE, PREFILL)},
    **{
        f"{wrapper}.reset_workspace_buffer": {"float_workspace_buffer", "int_workspace_buffer"}
        for wrapper in (DECODE, PREFILL)
    },
}  # fmt: skip


class Machine(NamedTuple):
    """The facts of a GPU that decide what runs on it."""

    capability: tuple[int, int]
    num_sms: int

    @staticmethod
    def of(device: torch.device) -> Machine:
        properties = torch.cuda.get_device_properties(device)
        return Machine((properties.major, properties.minor), properties.multi_processor_count)


def missing() -> str | None:
    """Why FlashInfer cannot be imported, None if it can."""
    for name, package in (("flashinfer", "flashinfer-python"), ("tvm_ffi", "apache-tvm-ffi")):
        if importlib.util.find_spec(name) is None:
            return f'{package} is not installed: pip install "graphspec[cuda]"'
    return None


def load_flashinfer() -> ModuleType:
    """The flashinfer module. Raises UnsupportedAttentionError if it is missing, too old, or not what we know."""
    if (why := missing()) is not None:
        raise UnsupportedAttentionError(f'{why}, or use attention_backend="reference"')
    flashinfer = importlib.import_module("flashinfer")
    check_version(flashinfer.__version__)
    for target, parameters in SIGNATURES.items():
        check_parameters(target, parameters, _parameters_of(target), flashinfer.__version__)
    return flashinfer


def check_version(version: str) -> None:
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:3])
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UnsupportedAttentionError(
            f'FlashInfer {version} is too old: install {oldest} or newer, or use attention_backend="reference"'
        )


def check_parameters(target: str, needed: set[str], present: set[str], version: str) -> None:
    """Raise UnsupportedAttentionError if the function `target` lacks a parameter that is passed to it."""
    if lacking := sorted(needed - present):
        raise UnsupportedAttentionError(
            f"FlashInfer {version} is not supported: {target.replace(':', '.')} takes no {lacking[0]}; install 0.6.18 "
            'or use attention_backend="reference"'
        )


def _parameters_of(target: str) -> set[str]:
    module, path = target.split(":")
    found: Any = importlib.import_module(f"flashinfer.{module}")
    owner = None
    for name in path.split("."):
        owner, found = found, getattr(found, name)
    names = set(inspect.signature(found).parameters)
    inner = getattr(owner, "_plan_impl", None)
    return names | set(inspect.signature(inner).parameters) if path.endswith(".plan") and inner else names


def unsupported(name: str, shape: AttentionShape, machine: Machine) -> str | None:
    """In one sentence that names an alternative, why the backend `name` cannot serve `shape` on `machine`; None if it
    can."""
    other = XQA if name in (FA2, FA2_SPLIT) else FA2
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f'{name} computes in bfloat16 or float16, not {shape.dtype}: choose such a dtype or "reference"'
    if name == XQA:
        if machine.capability[0] not in (9, 10, 12):
            return f'{name} needs compute capability 9, 10 or 12, this GPU has {machine.capability[0]}: use "{other}"'
        if shape.page_size not in (16, 32, 64, 128):
            return f'{name} needs a page_size of 16, 32, 64 or 128, not {shape.page_size}: change it or use "{other}"'
        if shape.head_dim % 16 or shape.head_dim > 256:
            return f'{name} needs a head size that 16 divides, up to 256, not {shape.head_dim}: use "reference"'
        if any(spec.softcap is not None for spec in shape.specs):
            return f'{name} has no soft cap of scores, which this model needs: use "{other}"'
        return None
    if machine.capability < (8, 0):
        return f'{name} needs compute capability 8.0 or newer, this GPU has {machine.capability}: use "reference"'
    if shape.head_dim not in (64, 128, 256):
        return f'{name} has kernels for head sizes 64, 128 and 256, not {shape.head_dim}: use "{other}" or "reference"'
    return None


def parse_plan(vector: Any, *, split: bool) -> PlanInfo:
    """The plan that a capture-time `plan` left in its wrapper. Raises UnsupportedAttentionError if its layout is not
    the one that `planner.Schedule` writes to.

    With `split` FlashInfer may still decide that the tiles alone fill the device and nothing is split.
    """
    numbers = [int(n) for n in vector]
    if len(numbers) != len(PlanInfo._fields):
        raise UnsupportedAttentionError(
            f"FlashInfer's plan has {len(numbers)} numbers, not {len(PlanInfo._fields)}: this version is not "
            "supported, install 0.6.18"
        )
    info = PlanInfo(*numbers)
    assert info.enable_cuda_graph == 1, f"the plan is not one for graphs: {info}"
    assert split or not info.split_kv, f"a plan without split is split: {info}"
    return info
