"""capture(fn, buffers) -> CapturedGraph: one function for every kind of graph, on every device."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

import torch

from graphs.buffers import PersistentBuffers, TensorSpec

Output = torch.Tensor | tuple[torch.Tensor, ...]


def as_tuple(output: Output) -> tuple[torch.Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


class CaptureError(RuntimeError):
    """A function cannot be captured, or a captured graph does not fit what it is replayed on."""


@dataclass(frozen=True)
class BakedValue:
    """A Python value that became part of a graph: where, in which op, as what. It never changes again."""

    line: str
    op: str
    value: object


@dataclass(frozen=True)
class Contract:
    """What a graph took for granted when it was captured, and `CapturedGraph.replay` holds it to."""

    key: Hashable
    outputs: tuple[TensorSpec, ...]
    baked: tuple[BakedValue, ...]


class Program(Protocol):
    """A captured function, as one backend keeps it."""

    baked: tuple[BakedValue, ...]
    pool_bytes: int  # device memory that belongs to the graph alone
    num_ops: int | None  # where it can be known

    @property
    def source(self) -> Callable[[], Output] | None:
        """What was captured, the oracle of every replay; None if the program rounds differently."""

    def run(self) -> Output:
        """Do again what was captured, on the same addresses."""


class CapturedGraph:
    """A replayable step. Its outputs are overwritten by the next replay, of this graph or of another one that shares
    its pool: copy them out before."""

    def __init__(self, key: Hashable, program: Program, buffers: PersistentBuffers, output: Output, seconds: float):
        self.key = key
        self.program = program
        self.capture_seconds = seconds
        self.num_replays = 0
        self.launch_seconds = 0.0  # host time of all replays: of the launch on CUDA, of the ops themselves on the CPU
        self.buffers = buffers
        self.contract = Contract(
            key=key,
            outputs=tuple(TensorSpec.of(f"output {i}", out) for i, out in enumerate(as_tuple(output))),
            baked=program.baked,
        )

    def replay(self) -> Output:
        """Run the graph on what is in the buffers now. Raises BufferError, naming it, if a buffer has moved."""
        started = time.perf_counter()
        self.buffers.verify()
        output = self.program.run()
        self.num_replays += 1
        if self.buffers.on_replay is not None:
            self.buffers.on_replay(self.key, as_tuple(output))
        self.launch_seconds += time.perf_counter() - started
        return output


Backend = Callable[[Callable[[], Output]], tuple[Program, Output]]


def capture(fn: Callable[[], Output], buffers: PersistentBuffers, *, key: Hashable, backend: Backend) -> CapturedGraph:
    """Capture `fn`, which takes its inputs from `buffers` and returns tensors.

    `fn` runs for real, once or more often, so the buffers must hold harmless inputs (padding). `backend` is
    `create_backend(device)`: a record of aten ops on the CPU, a CUDA graph on CUDA; with a `RegionCompiler`, of what it
    compiled.
    Raises CaptureError, with the line and the remedy, for what no graph can hold.
    """
    buffers.freeze()
    started = time.perf_counter()
    program, output = backend(fn)
    return CapturedGraph(key, program, buffers, output, time.perf_counter() - started)
