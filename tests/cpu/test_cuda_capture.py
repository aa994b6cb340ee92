"""The CUDA backend against a fake of torch.cuda: order of events, one pool, static outputs, translated errors.

What only a GPU can show (that kernels really are captured) is not shown here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from graphs import CaptureError, PersistentBuffers, capture
from graphs.cuda import WARM_UPS, CudaCapture


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
