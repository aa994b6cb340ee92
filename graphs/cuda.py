"""The CUDA backend: `torch.cuda.CUDAGraph`, one shared memory pool, warm-up on a side stream.

Written against the CUDA graphs notes of PyTorch 2.11 to 2.13 (`torch.cuda.graph`, `CUDAGraph.capture_begin`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from graphs.capture import BakedValue, CaptureError, Output

WARM_UPS = 2  # library handles, autotuning and lazy initialisation must be over before a capture begins


class CudaProgram:
    """One captured CUDA graph and its static outputs."""

    baked: tuple[BakedValue, ...] = ()  # what CUDA bakes cannot be listed: record the function on the CPU for that

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Output, pool_bytes: int) -> None:
        self._graph, self._output, self.pool_bytes = graph, output, pool_bytes
        self.num_ops: int | None = None

    def run(self) -> Output:
        self._graph.replay()
        return self._output


class CudaCapture:
    """Captures functions into graphs that share one memory pool, so capture the largest first.

    Graphs that share a pool may not be alive at once: the outputs of one are overwritten by the next, so they are
    copied out before another replay, which stream order alone guarantees if the copies are enqueued first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]

    def __call__(self, fn: Callable[[], Output]) -> tuple[CudaProgram, Output]:
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.no_grad(), torch.cuda.stream(self._side):
            for _ in range(WARM_UPS):
                fn()
        current.wait_stream(self._side)
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.no_grad(), torch.cuda.graph(graph, pool=self._pool, stream=self._side):
                output = fn()
        except RuntimeError as caught:
            raise CaptureError(_translate(caught)) from caught
        return CudaProgram(graph, output, torch.cuda.memory_reserved(self._device) - before), output


def _translate(error: RuntimeError) -> str:
    """A CUDA capture error in words that say what to do."""
    message = str(error)
    remedies = {
        "operation not permitted when stream is capturing": "something in it synchronises or copies to the host",
        "operation would make the legacy stream depend": "something in it runs on the default stream",
        "operation failed due to a previous error during capture": "an earlier operation in it may not be captured",
        "Cannot call CUDAGeneratorImpl": "it draws from the default random generator: use keyed noise",
    }
    for symptom, remedy in remedies.items():
        if symptom in message:
            return f"the function cannot be captured, {remedy}; graphs.guard names the line ({message.splitlines()[0]})"
    return f"the function cannot be captured: {message.splitlines()[0]}"
