"""The CUDA backend: `torch.cuda.CUDAGraph`, one shared memory pool, warm-up on a side stream.

Written against the CUDA graphs notes of PyTorch 2.11 to 2.13 (`torch.cuda.graph`, `CUDAGraph.capture_begin`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from graphs.capture import BakedValue, CaptureError, Output
from graphs.recorded import Rewrite, record

WARM_UPS = 2  # library handles, autotuning and lazy initialisation must be over before a capture begins


class CudaProgram:
    """One captured CUDA graph and its static outputs."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        source: Callable[[], Output],
        output: Output,
        pool_bytes: int,
        baked: tuple[BakedValue, ...],
    ) -> None:
        self.source, self.pool_bytes, self.baked = source, pool_bytes, baked
        self.num_ops: int | None = None
        self._graph, self._output = graph, output

    def run(self) -> Output:
        self._graph.replay()
        return self._output

    def dump_dot(self, path: str) -> None:
        """Write the nodes of the graph as Graphviz DOT, kernels with their parameters, by CUDA's own
        cudaGraphDebugDotPrint. Only for graphs captured with `debug=True`."""
        self._graph.debug_dump(path)


class CudaCapture:
    """Captures functions into graphs that share one memory pool, so capture the largest first.

    Graphs that share a pool may not be alive at once: the outputs of one are overwritten by the next, so they are
    copied out before another replay, which stream order alone guarantees if the copies are enqueued first.

    With `rewrite` (a `graphs.RegionCompiler`), what is captured is a record of the function, rewritten: then its ops
    must all go through the dispatcher, and the values it baked are listed. `debug` keeps what `dump_dot` needs.
    """

    def __init__(self, device: torch.device, rewrite: Rewrite | None = None, *, debug: bool = False) -> None:
        self._device, self._rewrite, self._debug = device, rewrite, debug
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]

    def __call__(self, fn: Callable[[], Output]) -> tuple[CudaProgram, Output]:
        baked: tuple[BakedValue, ...] = ()  # what CUDA alone bakes cannot be listed
        if self._rewrite is not None:
            program, _ = record(fn, self._rewrite)
            fn, baked = program.run, program.baked
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.no_grad(), torch.cuda.stream(self._side):
            for _ in range(WARM_UPS):
                fn()
        current.wait_stream(self._side)
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        if self._debug:
            graph.enable_debug_mode()
        try:
            with torch.no_grad(), torch.cuda.graph(graph, pool=self._pool, stream=self._side):
                output = fn()
        except RuntimeError as caught:
            raise CaptureError(_translate(caught)) from caught
        pool_bytes = torch.cuda.memory_reserved(self._device) - before
        return CudaProgram(graph, fn, output, pool_bytes, baked), output


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
