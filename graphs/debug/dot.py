"""The nodes of a CUDA graph, for Graphviz."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from graphs.capture import Output
from graphs.cuda import CudaCapture


def write_dot(path: Path, function: Callable[[], Output], device: torch.device) -> None:
    """Capture `function` once more, in CUDA's debug mode, and write the nodes of that graph as Graphviz DOT.

    Call it on the stream that runs the function. Raises ValueError for a device other than CUDA, whose graphs are
    records: `summarise` shows what is in those.
    """
    if device.type != "cuda":
        raise ValueError(f'the nodes of a CUDA graph need a CUDA device, not "{device}"')
    program, _ = CudaCapture(device, debug=True)(function)
    program.dump_dot(str(path))
