"""Hands a record of aten ops to Inductor, region by region.

A region is a run of aten ops between two ops that must stay as they are, such as attention with its declared mutation.
Regions of equal structure are compiled once: of a transformer's 30 layers, one. Nothing is traced again later, so there
is nothing that could recompile.
"""

from __future__ import annotations

import operator
import shutil
import sysconfig
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch._inductor
from torch import fx
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map

from graphs.recorded import Node, Ref, storage_of

# Inductor's own CUDA graphs stay off: what is captured, and when, is decided by this package. Shapes and strides were
# checked when the record was made.
INDUCTOR_OPTIONS: dict[str, Any] = {"triton.cudagraphs": False, "size_asserts": False}

COMPILED_NAMESPACES = ("aten", "prims")


def check_compiler(device: torch.device) -> None:
    """Raise RuntimeError, in one sentence, if Inductor could not build code for `device` on this machine."""
    if device.type != "cpu":
        return
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise RuntimeError("compile=True needs a C++ compiler: install g++ (Debian: apt install g++) or drop compile")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise RuntimeError(f"compile=True needs the Python headers ({header}): install python3-dev or drop compile")


@dataclass(frozen=True)
class Region:
    """Consecutive ops of a record, what they take from before, and what of theirs is used after."""

    nodes: tuple[Node, ...]
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]


class RegionCompiler:
    """A rewrite for `graphs.record`: every region becomes one call of compiled code.

    Raises what Inductor raises if a region cannot be compiled.
    """

    def __init__(self) -> None:
        self._compiled: dict[Hashable, Callable[..., Any]] = {}

    @property
    def num_compiled(self) -> int:
        """Different regions compiled so far. Constant once all graphs are captured."""
        return len(self._compiled)

    def __call__(
        self, nodes: Sequence[Node], results: Sequence[Ref], tensor: Callable[[Ref], torch.Tensor]
    ) -> list[Node]:
        steps: list[Node] = []
        for part in split(nodes, results):
            if isinstance(part, Node):
                steps.append(part)
            elif all(isinstance(node.op, OpOverload) and node.op.is_view for node in part.nodes):
                steps += part.nodes  # nothing to compute
            else:
                steps.append(self._call(part, tensor))
        return steps

    def _call(self, region: Region, tensor: Callable[[Ref], torch.Tensor]) -> Node:
        key = signature(region, tensor)
        if key not in self._compiled:
            inputs: list[Any] = [tensor(ref) for ref in region.inputs]
            with torch.no_grad(), persistent_cache():
                self._compiled[key] = torch._inductor.compile(to_module(region), inputs, options=INDUCTOR_OPTIONS)
        first = region.nodes[0]
        return Node(
            self._compiled[key], region.inputs, {}, region.outputs, False, first.line, first.module, first.position
        )


@contextmanager
def persistent_cache() -> Iterator[None]:
    """Inside, Inductor finds on disk what an earlier process compiled. It looks there only if a context says that no
    shape is symbolic. AOTAutograd's cache in front of it stays off: its key does not say which inputs share memory."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    with tracing(TracingContext(mode)), torch._functorch.config.patch(enable_autograd_cache=False):
        yield


def split(nodes: Sequence[Node], results: Sequence[Ref]) -> list[Region | Node]:
    """The record as regions, and the nodes between them that stay as they are, in order."""
    groups: list[list[Node] | Node] = []
    for node in nodes:
        if not isinstance(node.op, OpOverload) or node.op.namespace not in COMPILED_NAMESPACES:
            groups.append(node)
        elif groups and isinstance(groups[-1], list):
            groups[-1].append(node)
        else:
            groups.append([node])
    needed = set(results)  # by what comes later
    parts: list[Region | Node] = []
    for group in reversed(groups):
        if isinstance(group, Node):
            parts.append(group)
            needed.update(group.inputs())
        else:
            region = _region(group, needed)
            parts.append(region)
            needed.update(region.inputs)
    return parts[::-1]


def _region(nodes: Sequence[Node], needed: set[Ref]) -> Region:
    inputs: dict[Ref, None] = {}  # in order of first use
    made: dict[Ref, None] = {}
    for node in nodes:
        inputs.update((ref, None) for ref in node.inputs() if ref not in made)
        made.update((ref, None) for ref in node.outputs if ref not in inputs)
    return Region(tuple(nodes), tuple(inputs), tuple(ref for ref in made if ref in needed))


def signature(region: Region, tensor: Callable[[Ref], torch.Tensor]) -> Hashable:
    """Equal for regions that one piece of code can serve: same ops, arguments and layouts, and the same inputs share
    their memory."""
    numbers: dict[Ref, int] = {}
    storages: dict[int, int] = {}

    def describe(ref: Ref) -> tuple[Any, ...]:
        value = tensor(ref)
        memory = storages.setdefault(storage_of(value), len(storages))
        place = value.storage_offset() if ref in region.inputs else 0
        return tuple(value.shape), value.stride(), value.dtype, value.device, memory, place

    def number(value: Any) -> Any:
        return f"%{numbers.setdefault(value, len(numbers))}" if isinstance(value, Ref) else value

    inputs = tuple(describe(ref) for ref in region.inputs)
    for ref in region.inputs:
        number(ref)
    ops = tuple(
        (node.op, repr(tree_map(number, (node.args, node.kwargs))), tuple(number(ref) for ref in node.outputs))
        for node in region.nodes
    )
    return inputs, ops, tuple(number(ref) for ref in region.outputs)


def to_module(region: Region) -> fx.GraphModule:
    """The region as an FX graph: its inputs are placeholders, its outputs a tuple."""
    graph = fx.Graph()
    values: dict[Ref, fx.Node] = {ref: graph.placeholder(ref.name) for ref in region.inputs}
    for node in region.nodes:
        args, kwargs = tree_map(lambda x: values[x] if isinstance(x, Ref) else x, (node.args, node.kwargs))
        made = graph.call_function(node.op, args, kwargs)
        for i, ref in enumerate(node.outputs):
            if ref not in values:  # an op in place returns what it was given
                values[ref] = made if node.single else graph.call_function(operator.getitem, (made, i))
    graph.output(tuple(values[ref] for ref in region.outputs))
    return fx.GraphModule({}, graph)
