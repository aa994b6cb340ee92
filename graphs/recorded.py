"""The CPU's captured graphs: a flat record of the aten ops that a function ran, and a replay of that record.

A record bakes what a CUDA graph bakes: Python values, control flow, and the addresses of every tensor the function did
not make itself. What is forgotten here would be forgotten there, and a test without a GPU finds it. Recording costs
about as much as running the function once.

Two kinds of ops are folded, which nobody can see from outside: views of outside tensors are taken once (an address does
not change), and so are constants made of Python values alone (`arange`, `full`), unless the record writes to them.

Only ops of the dispatcher are seen. A kernel that is launched around it (raw Triton, a C extension) is not in the
record: wrap it with `torch.library.custom_op`. `compare_replay` finds one that was missed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from graphs.bindings import binding
from graphs.capture import BakedValue, CaptureError, Output, as_tuple

# Larger constants are not folded: they would be kept in memory.
MAX_FOLDED_BYTES = 1 << 20

FACTORIES = {"aten::arange", "aten::full", "aten::ones", "aten::scalar_tensor", "aten::zeros"}


@dataclass(frozen=True)
class Ref:
    """A tensor inside a record: number `index` of what its ops made (`outside` False), or of what they found."""

    index: int
    outside: bool

    @property
    def name(self) -> str:
        return f"{'c' if self.outside else 't'}{self.index}"


@dataclass(frozen=True)
class Node:
    """One op of a record. `args` and `kwargs` hold Refs in the place of tensors; `outputs` the Refs it made."""

    op: Callable[..., Any]  # an OpOverload, or what a rewrite put in the place of several
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Ref, ...]
    single: bool  # the op returns one tensor, not a sequence
    line: str
    module: str  # the innermost torch module that ran it, by qualified name; "" outside of any
    position: int  # among everything the function ran, folded ops included, `is_bookkeeping` ones not

    @property
    def name(self) -> str:
        return self.op._schema.name.removeprefix("aten::") if isinstance(self.op, OpOverload) else "compiled region"

    def inputs(self) -> Iterator[Ref]:
        return (leaf for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, Ref))


# Replaces the nodes of a record by others, once, before the first replay: takes the nodes, the Refs that are
# returned, and the tensor behind a Ref (of the recording run; only its shape, layout and storage may be relied upon).
Rewrite = Callable[[Sequence[Node], Sequence[Ref], Callable[[Ref], torch.Tensor]], list[Node]]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches a function run and writes down its ops. Enter `modules` around it to learn which module runs them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules = ModuleTracker()
        self.nodes: list[Node] = []
        self.outside: list[torch.Tensor] = []
        self._made: list[torch.Tensor] = []  # kept alive while recording, so that identities stay unique
        self._refs: dict[int, Ref] = {}
        self._position = 0
        self.written: set[int] = set()  # storages that some op writes to

    def ref(self, tensor: torch.Tensor) -> Ref:
        """The Ref of a tensor; one that no op made belongs to the outside."""
        known = self._refs.get(id(tensor))
        if known is None:
            known = self._refs[id(tensor)] = Ref(len(self.outside), outside=True)
            self.outside.append(tensor)
        return known

    def tensor(self, ref: Ref) -> torch.Tensor:
        return (self.outside if ref.outside else self._made)[ref.index]

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        line = caller_line()
        self.refuse(func, args, line)
        specs = mapped(lambda x: self.ref(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
        out = self.execute(func, args, kwargs)
        self.written.update(storage_of(tensor) for tensor in written_by(func, args, kwargs))
        outputs = tuple(self._output(t) for t in leaves(out) if isinstance(t, torch.Tensor))
        single = isinstance(out, torch.Tensor)
        module = max(self.modules.parents - {"Global"}, key=len, default="")
        self.nodes.append(Node(func, specs[0], specs[1], outputs, single, line, module, self._position))
        self._position += not is_bookkeeping(func)
        return out

    def refuse(self, func: OpOverload, args: tuple[Any, ...], line: str) -> None:
        """Raise CaptureError for an op that no graph can hold."""
        if depends_on_data(func, args):
            raise CaptureError(f"{line}: {func} gives the host a value or a shape that only the device knows")

    def execute(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def _output(self, tensor: torch.Tensor) -> Ref:
        known = self._refs.get(id(tensor))
        if known is None:
            known = self._refs[id(tensor)] = Ref(len(self._made), outside=False)
            self._made.append(tensor)
        return known


class RecordedProgram:
    """A record turned into straight-line Python: ops and outside tensors are bound once, values die at last use."""

    pool_bytes = 0

    def __init__(
        self, source: Callable[[], Output], recorder: Recorder, output: Output, rewrite: Rewrite | None
    ) -> None:
        self.outside = list(recorder.outside)
        folded, done = _fold(recorder, self.outside)
        self.nodes = [_substitute(node, folded) for i, node in enumerate(recorder.nodes) if i not in done]
        results = [folded.get(r, r) for r in (recorder.ref(t) for t in as_tuple(output))]
        self.baked = tuple(_baked_values(recorder.nodes))

        def tensor(ref: Ref) -> torch.Tensor:
            return self.outside[ref.index] if ref.outside else recorder.tensor(ref)

        steps = self.nodes if rewrite is None else rewrite(self.nodes, results, tensor)
        self.source = source if steps == self.nodes else None
        self.num_ops: int | None = len(steps)
        bound = _bind(steps, tensor)
        self._run = _compile(bound, self.outside, results, single=isinstance(output, torch.Tensor))

    def run(self) -> Output:
        return self._run()

    @property
    def ops(self) -> list[Node]:
        """The nodes that a dispatch mode sees when a record that was not rewritten runs."""
        return [node for node in self.nodes if not is_bookkeeping(node.op)]


def record(fn: Callable[[], Output], rewrite: Rewrite | None = None) -> tuple[RecordedProgram, Output]:
    """Run `fn` once and keep what it did. Raises CaptureError at the first op that no graph can hold."""
    recorder = Recorder()
    with torch.no_grad(), recorder.modules, recorder:
        output = fn()
    return RecordedProgram(fn, recorder, output, rewrite), output


def leaves(value: Any) -> Iterator[Any]:
    """The leaves of an argument or a result of an op, in order. torch's own `tree_leaves` knows many more kinds of
    containers and took a third of the time of a capture."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    else:
        yield value


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `function` of each leaf in its place, as torch's `tree_map` does it."""
    if isinstance(value, (list, tuple)):
        items = [mapped(function, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {name: mapped(function, item) for name, item in value.items()}
    return function(value)


def is_bookkeeping(func: Callable[..., Any]) -> bool:
    """Ops that torch inserts or omits by itself: results that are still referenced come back detached."""
    return func is torch.ops.aten.detach.default


def written_by(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an op says it writes to."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (tensor for tensor in leaves(value) if isinstance(tensor, torch.Tensor))


def depends_on_data(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether an op returns a value to the host, or a shape that follows from the content of a tensor."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if func._schema.name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.dynamic_output_shape in func.tags


def caller_line() -> str:
    """`file:line` of the innermost frame that belongs neither to torch nor to this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch.", "torch", "graphs.")):
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _fold(recorder: Recorder, outside: list[torch.Tensor]) -> tuple[dict[Ref, Ref], set[int]]:
    """Move values that are the same in every replay, and that nothing writes to, to `outside`. Returns old Ref -> new
    Ref, and the indices of the nodes that are no longer needed."""
    folded: dict[Ref, Ref] = {}
    done: set[int] = set()
    for i, node in enumerate(recorder.nodes):
        if len(node.outputs) != 1 or node.outputs[0].outside or node.outputs[0] in folded:
            continue
        tensor = recorder.tensor(node.outputs[0])
        inputs = list(node.inputs())
        fixed = all(ref.outside or ref in folded for ref in inputs)
        assert isinstance(node.op, OpOverload)
        is_view = bool(inputs) and fixed and node.op.is_view
        is_constant = (
            not inputs
            and node.op._schema.name in FACTORIES
            and tensor.numel() * tensor.element_size() <= MAX_FOLDED_BYTES
        )
        if (is_view or is_constant) and storage_of(tensor) not in recorder.written:
            folded[node.outputs[0]] = Ref(len(outside), outside=True)
            outside.append(tensor)
            done.add(i)
    return folded, done


def _substitute(node: Node, folded: dict[Ref, Ref]) -> Node:
    if not any(ref in folded for ref in node.inputs()):
        return node
    args, kwargs = mapped(lambda x: folded.get(x, x) if isinstance(x, Ref) else x, (node.args, node.kwargs))
    return replace(node, args=args, kwargs=kwargs)


def _bind(nodes: Sequence[Node], tensor: Callable[[Ref], torch.Tensor]) -> list[Node]:
    """The nodes with the cheapest function for each op, found once for calls of one kind."""
    found: dict[Any, Callable[..., Any]] = {}

    def kind(value: Any) -> Any:
        if isinstance(value, Ref):
            return tensor(value).dtype, tensor(value).dim()
        return tuple(map(kind, value)) if isinstance(value, (list, tuple)) else (type(value), value)

    def bind(node: Node) -> Node:
        if not isinstance(node.op, OpOverload) or node.op.namespace != "aten":
            return node
        key = node.op, kind(node.args), kind(tuple(node.kwargs.items()))
        if key not in found:
            args, kwargs = mapped(lambda x: tensor(x) if isinstance(x, Ref) else x, (node.args, node.kwargs))
            found[key] = binding(node.op, args, kwargs)
        return replace(node, op=found[key])

    return [bind(node) for node in nodes]


def _baked_values(nodes: Sequence[Node]) -> Iterator[BakedValue]:
    for node in nodes:
        for value in (*node.args, *node.kwargs.values()):
            if isinstance(value, (bool, int, float, str)):
                yield BakedValue(node.line, str(node.op), value)


def _compile(
    nodes: Sequence[Node], outside: Sequence[torch.Tensor], results: Sequence[Ref], *, single: bool
) -> Callable[[], Output]:
    """Python source for the nodes, as one function without arguments."""
    names: dict[str, Any] = {f"c{i}": tensor for i, tensor in enumerate(outside)}
    last_use = {ref: i for i, node in enumerate(nodes) for ref in (*node.inputs(), *node.outputs) if not ref.outside}
    for ref in results:
        last_use.pop(ref, None)
    dying: dict[int, list[str]] = {}
    for ref, i in last_use.items():
        dying.setdefault(i, []).append(ref.name)
    lines = []
    ops: dict[Callable[..., Any], str] = {}
    for i, node in enumerate(nodes):
        op = ops.setdefault(node.op, f"op{len(ops)}")
        call = ", ".join(
            [_source(a, names) for a in node.args] + [f"{k}={_source(v, names)}" for k, v in node.kwargs.items()]
        )
        fresh = [ref.name for ref in node.outputs if not ref.outside]
        target = f"{fresh[0]} = " if node.single and fresh else f"{', '.join(fresh)}, = " if fresh else ""
        lines.append(f"    {target}{op}({call})")
        if i in dying:
            lines.append(f"    {' = '.join(dying[i])} = None")
    returned = ", ".join(ref.name for ref in results)
    lines.append(f"    return {returned}" if single else f"    return ({returned},)")
    names.update({name: op for op, name in ops.items()})
    bound = ", ".join(f"{name}={name}" for name in names)  # defaults are locals: faster than globals
    exec(compile(f"def replay({bound}):\n" + "\n".join(lines), "<recorded graph>", "exec"), names)
    run: Callable[[], Output] = names["replay"]
    return run


def _source(value: Any, names: dict[str, Any]) -> str:
    """Python source of one argument; what has no literal is bound to a name."""
    if isinstance(value, Ref):
        return value.name
    if isinstance(value, (list, tuple)):
        items = ", ".join(_source(v, names) for v in value)
        return f"[{items}]" if isinstance(value, list) else f"({items},)"
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    name = f"v{len(names)}"
    names[name] = value
    return name


def storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
