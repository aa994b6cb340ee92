"""The CUDA backend against a fake of torch.cuda: order of events, one pool, static outputs, translated errors.

What only a GPU can show (that kernels really are captured) is not shown here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from graphs import CaptureError, PersistentBuffers, capture, compare_replay, create_backend
from graphs.cuda import WARM_UPS, CudaCapture
from graphs.recorded import Node


class FakeCuda:
    """Writes down what was asked of torch.cuda."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.capturing = False
        self.fail: str | None = None
        self.reserved = 1000

    def stream(self, name: str) -> Any:
        fake = self

        class Stream:
            def __init__(self, device: Any = None) -> None:
                self.name = name

            def wait_stream(self, other: Any) -> None:
                fake.log.append(f"{self.name} waits for {other.name}")

        return Stream

    def graph_class(self) -> Any:
        fake = self

        class Graph:
            def replay(self) -> None:
                fake.log.append("replay")

            def enable_debug_mode(self) -> None:
                fake.log.append("debug")

            def debug_dump(self, path: str) -> None:
                fake.log.append(f"dump to {path}")

        return Graph

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        self.log.append(f"on {stream.name}")
        yield

    @contextmanager
    def graph(self, graph: Any, pool: Any, stream: Any) -> Iterator[None]:
        self.log.append(f"capture on {stream.name} in pool {pool}")
        self.capturing = True
        try:
            if self.fail:
                raise RuntimeError(self.fail)
            yield
        finally:
            self.capturing = False
        self.reserved += 64


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    current = fake.stream("current")()
    for name, value in {
        "Stream": fake.stream("side"),
        "CUDAGraph": fake.graph_class(),
        "graph": fake.graph,
        "stream": fake.on_stream,
        "graph_pool_handle": lambda: 7,
        "current_stream": lambda device=None: current,
        "synchronize": lambda device=None: fake.log.append("synchronize"),
        "memory_reserved": lambda device=None: fake.reserved,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return fake


def test_warm_up_comes_before_the_capture_and_one_pool_serves_all(fake: FakeCuda) -> None:
    x = torch.ones(2)
    buffers = PersistentBuffers()
    buffers.add("x", x, writer="host")
    backend = CudaCapture(torch.device("cuda"))
    calls: list[bool] = []

    def fn() -> torch.Tensor:
        calls.append(fake.capturing)
        return x + 1

    first = capture(fn, buffers, key="a", backend=backend)
    assert calls == [False] * WARM_UPS + [True]
    assert fake.log == [
        "side waits for current", "on side", "current waits for side", "synchronize", "capture on side in pool 7",
    ]  # fmt: skip
    capture(fn, buffers, key="b", backend=backend)
    assert fake.log.count("capture on side in pool 7") == 2
    out = first.replay()
    assert first.replay() is out  # static: copy it out before the next replay
    assert fake.log[-2:] == ["replay", "replay"]
    assert (first.num_replays, first.program.pool_bytes, len(calls)) == (2, 64, 2 * (WARM_UPS + 1))


def test_with_a_rewrite_the_rewritten_record_is_captured_and_what_it_baked_is_listed(fake: FakeCuda) -> None:
    x = torch.ones(2)
    buffers = PersistentBuffers()
    buffers.add("x", x, writer="host")
    calls: list[bool] = []

    def fn() -> torch.Tensor:
        calls.append(fake.capturing)
        return x + 3

    rewritten: list[int] = []

    def rewrite(nodes: Sequence[Node], *rest: Any) -> list[Node]:
        rewritten.append(len(nodes))
        return list(nodes)

    graph = capture(fn, buffers, key="a", backend=create_backend(torch.device("cuda"), rewrite))
    assert (calls, rewritten) == ([False], [1])  # recorded once; warm-up and capture run the record
    assert "capture on side in pool 7" in fake.log
    assert [value.value for value in graph.contract.baked] == [3]
    assert compare_replay(graph) is None  # against the same code without the graph


def test_the_nodes_can_be_dumped_if_the_graph_was_captured_for_it(fake: FakeCuda) -> None:
    program, _ = CudaCapture(torch.device("cuda"), debug=True)(lambda: torch.ones(1))
    assert fake.log.index("debug") < fake.log.index("capture on side in pool 7")
    program.dump_dot("graph.dot")
    assert fake.log[-1] == "dump to graph.dot"


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("CUDA error: operation not permitted when stream is capturing", "synchronises or copies to the host"),
        ("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture", "keyed noise"),
        ("something new\nwith details", "cannot be captured: something new"),
    ],
)
def test_capture_errors_say_what_to_do(fake: FakeCuda, message: str, remedy: str) -> None:
    fake.fail = message
    with pytest.raises(CaptureError, match=remedy) as caught:
        CudaCapture(torch.device("cuda"))(lambda: torch.ones(1))
    assert "\n" not in str(caught.value)
