"""From the name in a configuration to a backend."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from attention.backend import AttentionBackend, AttentionShape, UnsupportedAttentionError
from attention.cpu.native_backend import NativeBackend
from attention.cpu.native_library import NoNativeError
from attention.cpu.torch_backend import CpuBackend
from attention.flashinfer.choice import ChoiceTable, Line
from attention.flashinfer.guards import FA2, FA2_SPLIT, NAMES, XQA, Machine, missing, unsupported
from attention.flashinfer.per_bucket import PerBucket
from attention.reference import ReferenceBackend

CPU_NAMES = ("cpu", "cpu_native", "cpu_torch")


def create_backend(
    name: str, shape: AttentionShape, *, lines: Iterable[Line] = (), in_flight: int = 3
) -> AttentionBackend:
    """The backend called `name`; "auto" is "cpu" on the CPU, FlashInfer on a GPU where it can serve `shape`, and else
    the torch reference, with a warning. `lines` is a measured table for "auto"; `in_flight` bounds the launches whose
    prefill plans the device may not have read yet.

    Raises ValueError for an unknown name and UnsupportedAttentionError, in one sentence that names an alternative, for
    a backend that cannot serve `shape`.
    """
    on_cpu = shape.device.type == "cpu"
    if name not in ("auto", *CPU_NAMES, "reference", *NAMES):
        known = ", ".join(f'"{other}"' for other in ("auto", *CPU_NAMES, "reference"))
        raise ValueError(f'unknown attention backend "{name}": use {known} or one of {", ".join(NAMES)}')
    if name == "reference":
        return ReferenceBackend()
    if name in CPU_NAMES and not on_cpu:
        raise UnsupportedAttentionError(
            f'attention_backend "{name}": the device is {shape.device}; use "auto" or "reference"'
        )
    if name in CPU_NAMES or (name == "auto" and on_cpu):
        return cpu_backend(shape, {"cpu_native": True, "cpu_torch": False}.get(name))
    why = _why_no_flashinfer(shape)
    if why is None:
        machine = Machine.of(shape.device)
        if name == "auto" and all(unsupported(other, shape, machine) for other in NAMES):
            why = unsupported(FA2_SPLIT, shape, machine)
        else:
            return flashinfer_backend(ChoiceTable(shape, machine, lines, None if name == "auto" else name), in_flight)
    if name != "auto":
        raise UnsupportedAttentionError(f'attention_backend "{name}": {why}; use "auto" or "reference"')
    warnings.warn(f"attention runs on the torch reference, which is slow on a GPU: {why}", stacklevel=2)
    return ReferenceBackend()


def cpu_backend(shape: AttentionShape, native: bool | None = None) -> AttentionBackend:
    """The one in C++ (`native`), the one on torch, or by default the first if it can be built here.

    Raises UnsupportedAttentionError if `native` is True and it cannot be built.
    """
    if native is False:
        return CpuBackend(shape)
    try:
        return NativeBackend(shape.dtype)
    except NoNativeError as error:
        if native:
            raise UnsupportedAttentionError(f'attention_backend "cpu_native": {error}; use "cpu_torch"') from error
        return CpuBackend(shape, native_reason=str(error))


def flashinfer_backend(table: ChoiceTable, in_flight: int) -> PerBucket:
    """FlashInfer for decode steps as `table` says, and for prefill if it can."""
    from attention.flashinfer.prefill import Fa2Prefill

    shape, machine = table.shape, table.machine
    prefill: AttentionBackend = ReferenceBackend()
    if (why := unsupported(FA2, shape, machine)) is None:
        prefill = Fa2Prefill(shape, machine, in_flight)
    else:
        warnings.warn(f"prefill attends on the torch reference: {why}", stacklevel=3)
    return PerBucket(table.choose, lambda name: decode_backend(name, shape, machine), prefill)


def decode_backend(name: str, shape: AttentionShape, machine: Machine) -> AttentionBackend:
    """The FlashInfer backend `name` for decode steps, unchecked."""
    from attention.flashinfer.fa2 import Fa2Backend
    from attention.flashinfer.xqa import XqaBackend

    return XqaBackend(shape) if name == XQA else Fa2Backend(shape, machine, split=name == FA2_SPLIT)


def _why_no_flashinfer(shape: AttentionShape) -> str | None:
    if shape.device.type != "cuda":
        return f"FlashInfer needs a GPU, the device is {shape.device}"
    return missing()
