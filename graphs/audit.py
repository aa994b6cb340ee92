"""Audit: who writes which buffer, in which order, and who still reads what a replay has overwritten."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any, Self

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphs.buffers import PersistentBuffers
from graphs.recorded import caller_line, storage_of, written_by


class Audit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches one step and reports, by name, a buffer that somebody other than its writer wrote, or that was read
    before its writer had written it in this step; and the output of a graph that is read after another graph was
    replayed, which on CUDA shares its memory.

    The parts of the step say who they are with `PersistentBuffers.writing`.
    """

    def __init__(self, buffers: PersistentBuffers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.findings: list[str] = []
        self._buffers = buffers
        self._names = {storage_of(tensor): name for name, tensor in buffers.items()}
        self._written: set[str] = set()
        self._last: Hashable = None  # the graph replayed last
        self._outputs: list[tuple[weakref.ref[torch.Tensor], Hashable]] = []

    def __enter__(self) -> Self:
        self._buffers.on_replay = self._replayed
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]
        self._buffers.on_replay = None

    def _replayed(self, key: Hashable, outputs: tuple[torch.Tensor, ...]) -> None:
        self._last = key
        self._outputs = [(ref, k) for ref, k in self._outputs if ref() is not None and k != key]
        self._outputs += [(weakref.ref(out), key) for out in outputs]

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not func.is_view:
            written = {id(tensor) for tensor in written_by(func, args, kwargs)}
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor):
                    self._touch(tensor, id(tensor) in written)
        return func(*args, **kwargs)

    def _touch(self, tensor: torch.Tensor, writes: bool) -> None:
        name, part = self._names.get(storage_of(tensor)), self._buffers.part
        if name is None:
            self._check_output(tensor)
            return
        writer = self._buffers.writer(name)
        if writes:
            self._written.add(name)
            if part != writer:
                self._report(f'"{name}" is written by {part or "nobody in particular"}, its writer is {writer}')
        elif self._buffers.is_written_every_step(name) and name not in self._written:
            self._report(f'"{name}" is read before {writer} has written it in this step')

    def _check_output(self, tensor: torch.Tensor) -> None:
        for ref, key in self._outputs:
            output = ref()
            if key != self._last and output is not None and storage_of(output) == storage_of(tensor):
                self._report(f"the output of graph {key} is used after graph {self._last} ran: copy it out before")

    def _report(self, sentence: str) -> None:
        finding = f"{caller_line()}: {sentence}"
        if finding not in self.findings:
            self.findings.append(finding)
