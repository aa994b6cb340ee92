"""CaptureGuard: watch a function run and list everything that may not be captured, or would go stale in a graph.

The function runs eagerly, twice: what is the same in both runs may be baked into a graph, what differs may not.
Works on any device; on the CPU it finds what would break on CUDA. Under a `FakeTensorMode` it works on "cuda" tensors
without a GPU and without computing anything; there a host read has no value to give, so a run ends at the first one.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from graphs.buffers import PersistentBuffers
from graphs.capture import Output
from graphs.recorded import Recorder, caller_line, depends_on_data, storage_of

HOST_READS = {
    "item": "the host reads a value",
    "tolist": "the host reads values",
    "numpy": "the host reads values",
    "cpu": "the tensor is copied to the host",
    "__bool__": "Python branches on a tensor",
    "__int__": "the host reads a value",
    "__float__": "the host reads a value",
    "__index__": "the host reads a value",
    "__contains__": "the host reads a value",
}

REMEDIES = {
    "host read": "keep the value on the device: use torch.where, gather or a mask instead of Python",
    "dynamic shape": "keep the shape static: compute on all rows and mask, or use torch.where",
    "per-call constant": "make the tensor once, outside the function; in a graph it is copied once and goes stale",
    "default generator": "compute noise from explicit keys (see graphspec.sampling): a replay draws what was captured",
    "foreign tensor": "register it in PersistentBuffers, or make it inside the function",
    "kept alive": "return it, or drop the reference: the next replay overwrites its memory",
    "Python value": "pass it as a tensor in a persistent buffer: a graph keeps the value of the capture for ever",
    "control flow": "do not branch on state that changes; give each branch a graph key of its own",
}


@dataclass(frozen=True)
class Finding:
    """One thing that may not be captured: the kind, the op or name, the caller's line, and why."""

    kind: str
    what: str
    line: str
    why: str

    @property
    def remedy(self) -> str:
        return REMEDIES[self.kind]

    def __str__(self) -> str:
        return f"{self.line}: {self.kind}: {self.what}: {self.why}. {self.remedy[0].upper()}{self.remedy[1:]}."


class CaptureGuard:
    """Watches functions that take their inputs from `buffers` and may use `constants` (parameters, buffers of modules)
    whose address and meaning are fixed."""

    def __init__(self, buffers: PersistentBuffers, constants: Iterable[torch.Tensor] = ()) -> None:
        self._known = {storage_of(t) for t in (*buffers.values(), *constants)}

    def inspect(self, fn: Callable[[], Output]) -> list[Finding]:
        """Everything that was found, in order of appearance. `fn` is run twice."""
        first, second = _Watcher(self._known), _Watcher(self._known)
        for watcher in (first, second):
            try:
                with torch.no_grad(), watcher.host, watcher:
                    watcher.output = fn()
            except Exception:
                if not watcher.ended_on_fake_data():
                    raise
                return list(dict.fromkeys((*first.findings, *second.findings)))
        findings = [*first.findings, *_changes(first, second), *first.kept_alive(), *second.foreign()]
        return list(dict.fromkeys(findings))


class _HostReads(TorchFunctionMode):
    """Sees the tensor methods that never become an op on the CPU (`.tolist()`, `.numpy()`, `.cpu()`)."""

    def __init__(self, watcher: _Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        to_host = name == "to" and any(isinstance(a, str) and a == "cpu" for a in (*args[1:], *(kwargs or {}).values()))
        if (name in HOST_READS or to_host) and not self._watcher.inside_op:
            why = HOST_READS.get(name, HOST_READS["cpu"])
            self._watcher.findings.append(Finding("host read", f"Tensor.{name}", caller_line(), why))
        return func(*args, **(kwargs or {}))


class _Watcher(Recorder):  # type: ignore[no-untyped-call]
    """Notes a finding where a plain recorder raises."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.findings: list[Finding] = []
        self.inside_op = False  # what the Python code of a custom op does is not captured
        self.host = _HostReads(self)
        self.output: Output = ()
        self._known = known
        self._fake = False
        self._first_use: dict[int, tuple[str, str]] = {}

    def refuse(self, func: OpOverload, args: tuple[Any, ...], line: str) -> None:
        name = func._schema.name.removeprefix("aten::")
        if name in ("_local_scalar_dense", "item"):
            if not any(f.line == line and f.kind == "host read" for f in self.findings):
                self.findings.append(Finding("host read", name, line, "the host reads a value"))
        elif depends_on_data(func, args):
            self.findings.append(Finding("dynamic shape", name, line, "its shape or value follows from the data"))
        elif torch.Tag.nondeterministic_seeded in func.tags and name != "native_dropout":
            self.findings.append(Finding("default generator", name, line, "it draws from the default generator"))
        elif name in ("lift_fresh", "lift_fresh_copy"):
            self.findings.append(
                Finding("per-call constant", "torch.tensor", line, "it is made from Python in every call")
            )
        for leaf in tree_leaves(args):
            if isinstance(leaf, torch.Tensor):
                self._fake |= isinstance(leaf, FakeTensor)
                self._first_use.setdefault(id(leaf), (name, line))

    def ended_on_fake_data(self) -> bool:
        """Whether the run ended because it needed a value or a shape that fake tensors do not have."""
        return self._fake and bool(self.findings) and self.findings[-1].kind in ("host read", "dynamic shape")

    def execute(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.inside_op = True
        try:
            return func(*args, **kwargs)
        finally:
            self.inside_op = False

    def foreign(self) -> Iterator[Finding]:
        """Outside tensors that are neither buffers nor constants. Values that the host made for one call are reported
        where they are made."""
        lifted = {ref.index for n in self.nodes if n.name.startswith("lift") for ref in n.inputs()}
        for index, tensor in enumerate(self.outside):
            if storage_of(tensor) not in self._known and index not in lifted:
                op, line = self._first_use[id(tensor)]
                shape = "x".join(map(str, tensor.shape)) or "scalar"
                why = f"a tensor ({shape}, {tensor.dtype}) from outside is used that nobody registered"
                yield Finding("foreign tensor", op, line, why)

    def kept_alive(self) -> Iterator[Finding]:
        """Tensors made in the call, other than its output, that somebody still holds."""
        returned = {storage_of(t) for t in tree_leaves(self.output) if isinstance(t, torch.Tensor)}
        made = [(weakref.ref(t), storage_of(t)) for t in self._made]
        lines = {ref.index: n for n in self.nodes for ref in n.outputs if not ref.outside}
        self._made.clear()
        gc.collect()
        for index, (alive, storage) in enumerate(made):
            if alive() is not None and storage not in returned:
                node = lines[index]
                yield Finding("kept alive", node.name, node.line, "a reference to its result outlives the call")


def _changes(first: _Watcher, second: _Watcher) -> Iterator[Finding]:
    """Python values and control flow that differ between two calls."""
    for a, b in zip_longest(first.nodes, second.nodes):
        if a is None or b is None or a.op is not b.op:
            node = a or b
            why = "two calls did not run the same ops"
            yield Finding("control flow", node.name, node.line, why)
            return
        for x, y in zip(tree_leaves((a.args, a.kwargs)), tree_leaves((b.args, b.kwargs)), strict=False):
            if isinstance(x, (bool, int, float)) and x != y:
                yield Finding("Python value", a.name, a.line, f"it was {x} in one call and {y} in the next")
