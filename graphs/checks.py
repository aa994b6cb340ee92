"""Checks of captured graphs: replay against eager, poisoned padding, and an audit of who writes which buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphs.buffers import PersistentBuffers
from graphs.capture import CapturedGraph, Output
from graphs.recorded import RecordedProgram, caller_line, is_bookkeeping

POISONS = {"NaN": float("nan"), "-1": -1.0, "0x7f": None}  # None: every byte is 0x7f


@dataclass(frozen=True)
class Difference:
    """The first place where a replay is not what the function does when it runs eagerly."""

    what: str  # an op, an output or a buffer
    line: str  # where the function runs that op; empty for outputs and buffers

    def __str__(self) -> str:
        return f"{self.what} differs" + (f", at {self.line}" if self.line else "")


def compare_replay(graph: CapturedGraph, fn: Callable[[], Output], buffers: PersistentBuffers) -> Difference | None:
    """Replay `graph` and run `fn`, which it was captured from, on the same buffers; None if all bits agree.

    Recorded graphs are compared op by op, others by outputs and buffers. The buffers are left as they were.
    """
    before = _snapshot(buffers)
    with torch.no_grad(), _Fingerprints() as replayed:
        output = graph.program.run()
    replay_out = [out.clone() for out in _as_tuple(output)]
    replay_after = _snapshot(buffers)
    _restore(buffers, before)
    with torch.no_grad(), _Fingerprints() as eager:
        output = fn()
    eager_out = [out.clone() for out in _as_tuple(output)]
    eager_after = _snapshot(buffers)
    _restore(buffers, before)

    if isinstance(graph.program, RecordedProgram):
        nodes = [node for node in graph.program.nodes if not is_bookkeeping(node.op)]
        for node, (op, _, bits) in zip(nodes, replayed.seen, strict=True):
            if node.position >= len(eager.seen) or eager.seen[node.position][0] is not op:
                return Difference(f"control flow before {op}", node.line)
            if eager.seen[node.position][2] != bits:
                return Difference(str(op), eager.seen[node.position][1])
    for i, (a, b) in enumerate(zip(replay_out, eager_out, strict=True)):
        if _bits(a) != _bits(b):
            return Difference(f"output {i}", "")
    return next(
        (Difference(f'buffer "{n}"', "") for n in before if _bits(replay_after[n]) != _bits(eager_after[n])), None
    )


def poison(
    graph: CapturedGraph,
    buffers: PersistentBuffers,
    padding: Mapping[str, Any],
    real: Callable[[tuple[torch.Tensor, ...]], list[torch.Tensor]],
) -> list[str]:
    """Replay with garbage in everything that padding rows own, and require the rest to be equal bit for bit.

    `padding` names buffers and the index of what in them belongs to padding; `real` picks from the outputs what
    belongs to real rows. Returns one sentence per violation. The buffers are left as they were.
    """
    before = _snapshot(buffers)

    def replay() -> tuple[list[int], dict[str, int]]:
        outputs = [_bits(out) for out in real(_as_tuple(graph.replay()))]
        after = _snapshot(buffers)
        for name, index in padding.items():
            after[name][index] = 0
        _restore(buffers, before)
        return outputs, {name: _bits(tensor) for name, tensor in after.items()}

    clean_out, clean_after = replay()
    found = []
    for kind, value in POISONS.items():
        for name, index in padding.items():
            _fill(buffers[name], index, value)
        out, after = replay()
        found += [
            f"{kind} in padding changes output {i}"
            for i, (a, b) in enumerate(zip(clean_out, out, strict=True))
            if a != b
        ]
        found += [f'{kind} in padding changes buffer "{name}"' for name in after if after[name] != clean_after[name]]
    return found


class Audit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches one step and reports, by name, a buffer that somebody other than its writer wrote, or that was read
    before its writer had written it in this step.

    The parts of the step say who they are with `PersistentBuffers.writing`.
    """

    def __init__(self, buffers: PersistentBuffers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.findings: list[str] = []
        self._buffers = buffers
        self._names = {tensor.untyped_storage()._cdata: name for name, tensor in buffers.items()}
        self._written: set[str] = set()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not func.is_view:
            for i, argument in enumerate(func._schema.arguments):
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                writes = argument.alias_info is not None and argument.alias_info.is_write
                for tensor in tree_leaves(value):
                    if isinstance(tensor, torch.Tensor):
                        self._touch(tensor, writes)
        return func(*args, **kwargs)

    def _touch(self, tensor: torch.Tensor, writes: bool) -> None:
        name, part = self._names.get(tensor.untyped_storage()._cdata), self._buffers.part
        if name is None:
            return
        writer = self._buffers.writer(name)
        if writes:
            self._written.add(name)
            if part != writer:
                self._report(f'"{name}" is written by {part or "nobody in particular"}, its writer is {writer}')
        elif self._buffers.is_written_every_step(name) and name not in self._written:
            self._report(f'"{name}" is read before {writer} has written it in this step')

    def _report(self, sentence: str) -> None:
        finding = f"{caller_line()}: {sentence}"
        if finding not in self.findings:
            self.findings.append(finding)


class _Fingerprints(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Op, line and a hash of the result of everything that runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[OpOverload, str, int]] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if is_bookkeeping(func):
            return out
        bits = hash(tuple(_bits(t) for t in tree_leaves(out) if isinstance(t, torch.Tensor)))
        self.seen.append((func, caller_line(), bits))
        return out


def _bits(tensor: torch.Tensor) -> int:
    """A hash of the bytes, so that NaN equals NaN and -0.0 is not 0.0."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hash(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0


def _fill(tensor: torch.Tensor, index: Any, value: float | None) -> None:
    if value is None:
        part = tensor[index].contiguous()
        tensor[index] = torch.full_like(part.reshape(-1).view(torch.uint8), 0x7F).view(part.dtype).view(part.shape)
    elif tensor.is_floating_point() or value == value:
        tensor[index] = value


def _snapshot(buffers: PersistentBuffers) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in buffers.items()}


def _restore(buffers: PersistentBuffers, saved: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in buffers.items():
        tensor.copy_(saved[name])


def _as_tuple(output: Output) -> tuple[torch.Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)
