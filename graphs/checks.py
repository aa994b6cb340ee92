"""Checks of captured graphs: replay against eager, and poisoned padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphs.buffers import PersistentBuffers
from graphs.capture import CapturedGraph, Output, Program, as_tuple
from graphs.recorded import RecordedProgram, caller_line, is_bookkeeping, storage_of, written_by

POISONS = {"NaN": float("nan"), "-1": -1.0, "0x7f": None}  # None: every byte is 0x7f


@dataclass(frozen=True)
class Difference:
    """The first place where a replay is not what the function does when it runs eagerly."""

    what: str  # an op, an output or a buffer
    line: str  # where the function runs that op; empty for outputs and buffers

    def __str__(self) -> str:
        return f"{self.what} differs" + (f", at {self.line}" if self.line else "")


def compare_replay(
    graph: CapturedGraph, fn: Callable[[], Output] | None = None, *, parts: Mapping[str, Any] | None = None
) -> Difference | None:
    """Replay `graph` and run what it was captured from (or `fn`) on the same buffers; None if all bits agree.

    Recorded graphs are compared op by op, others by outputs and buffers. The buffers are left as they were; `parts`
    maps buffers to the index of all that a step can touch in them here, to save copying the rest.

    Raises ValueError for a compiled record without `fn`: compiled code rounds differently from the ops it came from, so
    bits say nothing. (A CUDA graph of compiled code is compared with the same code run without the graph.)
    """
    program = graph.program
    oracle = fn or program.source
    if oracle is None:
        raise ValueError("a compiled record has no bit-equal oracle: capture without compile to compare op by op")
    saved = _Saved(graph.buffers, parts or {})
    with torch.no_grad(), _Fingerprints() as replayed:
        output = program.run()
    replay_out = [_bits(out) for out in as_tuple(output)]
    replay_after = saved.bits_then_restore()
    with torch.no_grad(), _Fingerprints() as eager:
        output = oracle()
    eager_out = [_bits(out) for out in as_tuple(output)]
    eager_after = saved.bits_then_restore()

    record = _plain_record(program)
    if record is not None and (found := _first_op(record, replayed, eager)) is not None:
        return found
    for i, (a, b) in enumerate(zip(replay_out, eager_out, strict=True)):
        if a != b:
            return Difference(f"output {i}", "")
    return next((Difference(f'buffer "{n}"', "") for n in replay_after if replay_after[n] != eager_after[n]), None)


def _plain_record(program: Program) -> RecordedProgram | None:
    """`program`, if it is a record that replays the ops of its source one by one."""
    return program if isinstance(program, RecordedProgram) and program.source is not None else None


def _first_op(program: RecordedProgram, replayed: _Fingerprints, eager: _Fingerprints) -> Difference | None:
    for node, (op, _, bits) in zip(program.ops, replayed.seen, strict=True):
        inside = f" in {node.module}" if node.module else ""
        if node.position >= len(eager.seen) or eager.seen[node.position][0] is not op:
            return Difference(f"control flow before {op}{inside}", node.line)
        if eager.seen[node.position][2] != bits:
            return Difference(f"{op}{inside}", eager.seen[node.position][1])
    return None


def poison(
    graph: CapturedGraph,
    padding: Mapping[str, Any],
    real: Callable[[tuple[torch.Tensor, ...]], list[torch.Tensor]],
    *,
    parts: Mapping[str, Any] | None = None,
) -> list[str]:
    """Replay with garbage in everything that padding rows own, and require the rest to be equal bit for bit.

    `padding` names buffers and the index of what in them belongs to padding; `real` picks from the outputs what
    belongs to real rows; `parts` as for `compare_replay`. Returns one sentence per violation. The buffers are left as
    they were.
    """
    buffers, saved = graph.buffers, _Saved(graph.buffers, parts or {})

    def replay() -> tuple[list[int], dict[str, int]]:
        outputs = [_bits(out) for out in real(as_tuple(graph.program.run()))]
        for name, index in padding.items():
            buffers[name][index] = 0
        return outputs, saved.bits_then_restore()

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
        for name in after:
            if after[name] != clean_after[name]:
                writer = _first_wrong_write(graph, saved, name, padding, value)
                found.append(f'{kind} in padding changes buffer "{name}"{writer}')
    return found


def _first_wrong_write(
    graph: CapturedGraph, saved: _Saved, name: str, padding: Mapping[str, Any], value: float | None
) -> str:
    """The op of a record, with its line, that first writes something else to `name` because of the padding."""
    record = _plain_record(graph.program)
    if record is None:
        return ""
    buffers, writes = graph.buffers, []
    for poisoned in (False, True):
        if poisoned:
            for other, index in padding.items():
                _fill(buffers[other], index, value)
        with torch.no_grad(), _Writes(buffers[name], padding.get(name)) as watched:
            record.run()
        writes.append(watched.seen)
        saved.bits_then_restore()
    for (position, clean), (_, wrong) in zip(*writes, strict=True):
        if clean != wrong:
            node = record.ops[position]
            return f", written by {node.op} at {node.line}"
    return ""


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


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What one buffer holds, `without` its padding, after every op that writes to it."""

    def __init__(self, buffer: torch.Tensor, without: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[int, int]] = []  # (position of the op, bits)
        self._buffer, self._without, self._position = buffer, without, 0

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if is_bookkeeping(func):
            return out
        if any(storage_of(t) == storage_of(self._buffer) for t in written_by(func, args, kwargs or {})):
            content = self._buffer.clone()
            if self._without is not None:
                content[self._without] = 0
            self.seen.append((self._position, _bits(content)))
        self._position += 1
        return out


def _bits(tensor: torch.Tensor) -> int:
    """A hash of the bytes, so that NaN equals NaN and -0.0 is not 0.0."""
    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)  # one element has any stride
    return hash(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0


def _fill(tensor: torch.Tensor, index: Any, value: float | None) -> None:
    if value is None:
        part = tensor[index].contiguous()
        tensor[index] = torch.full_like(part.reshape(-1).view(torch.uint8), 0x7F).view(part.dtype).view(part.shape)
    elif tensor.is_floating_point() or value == value:
        tensor[index] = value


class _Saved:
    """Copies of the buffers, or of the parts that matter, to compare with and to go back to."""

    def __init__(self, buffers: PersistentBuffers, parts: Mapping[str, Any]) -> None:
        self._buffers, self._index = buffers, {name: parts.get(name, ...) for name in buffers}
        self._copies = {name: buffers[name][index].clone() for name, index in self._index.items()}

    def bits_then_restore(self) -> dict[str, int]:
        bits = {name: _bits(self._buffers[name][index]) for name, index in self._index.items()}
        for name, index in self._index.items():
            self._buffers[name][index] = self._copies[name]
        return bits
