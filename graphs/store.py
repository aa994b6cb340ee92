"""All captured graphs of one owner: lookup by key, and whether every step found its graph."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from graphs.buffers import PersistentBuffers
from graphs.capture import Backend, CapturedGraph, Output, capture
from graphs.cuda import CudaCapture
from graphs.recorded import Rewrite, record

TIMELINE = 10_000  # steps that are remembered one by one


def create_backend(device: torch.device, rewrite: Rewrite | None = None) -> Backend:
    """What `capture` needs on `device`: CUDA graphs on CUDA, records elsewhere. With `rewrite` of rewritten records."""
    return CudaCapture(device, rewrite) if device.type == "cuda" else partial(record, rewrite=rewrite)


@dataclass(frozen=True)
class LedgerLine:
    """What one graph costs, and how often it is used."""

    key: Hashable
    num_replays: int
    capture_seconds: float
    launch_seconds: float  # of all replays
    pool_bytes: int  # of this graph alone
    static_bytes: int  # of the persistent buffers, which all graphs share
    num_ops: int | None  # known for recorded graphs


class GraphStore(Collection[Hashable]):
    """Captured graphs by key, and for every step which one it replayed, or why none.

    `backend` is what `capture` takes. `prepare` puts harmless inputs into the buffers; it runs before every capture,
    since capturing runs the function for real.
    """

    def __init__(
        self,
        buffers: PersistentBuffers,
        backend: Backend,
        prepare: Callable[[], None],
    ) -> None:
        self.buffers = buffers
        self.off_graph: Counter[str] = Counter()
        self.timeline: deque[tuple[Hashable, str]] = deque(maxlen=TIMELINE)  # (key, reason it was off graph or "")
        self._backend, self._prepare = backend, prepare
        self._graphs: dict[Hashable, CapturedGraph] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._graphs

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._graphs)

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(self, key: Hashable, fn: Callable[[], Output]) -> CapturedGraph:
        """Capture `fn` under `key`, which must be new."""
        assert key not in self._graphs, "a key names one graph"
        self._prepare()
        graph = self._graphs[key] = capture(fn, self.buffers, key=key, backend=self._backend)
        self._prepare()
        return graph

    def __getitem__(self, key: Hashable) -> CapturedGraph:
        return self._graphs[key]

    def replay(self, key: Hashable) -> Output:
        """Run the step `key` on its graph."""
        self.timeline.append((key, ""))
        return self._graphs[key].replay()

    def run_off_graph(self, key: Hashable, reason: str, fn: Callable[[], Output]) -> Output:
        """Run the step `key` without a graph; counted, always with a reason."""
        self.timeline.append((key, reason))
        self.off_graph[reason] += 1
        return fn()

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self._graphs.values())

    def never_replayed(self) -> list[Hashable]:
        """Graphs that were captured and not used: each is a finding."""
        return [key for key, graph in self._graphs.items() if not graph.num_replays]

    def ledger(self) -> list[LedgerLine]:
        return [
            LedgerLine(
                key,
                graph.num_replays,
                graph.capture_seconds,
                graph.launch_seconds,
                graph.program.pool_bytes,
                self.buffers.num_bytes,
                graph.program.num_ops,
            )
            for key, graph in self._graphs.items()
        ]
