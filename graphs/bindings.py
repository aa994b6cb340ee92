"""torch's own Python functions instead of dispatcher ops: the same ops, at half the time per call.

Replays of small tensors are bound by the time it takes to call an op from Python, and `torch.mul` takes half of what
`torch.ops.aten.mul.Tensor` does. Which function stands for which op is found by calling it: it must reach the very op
with the very arguments. Nothing is computed on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

NAMESPACES = (torch._C._VariableFunctions, torch._C.TensorBase, torch._C._nn)


class _Reached(Exception):
    """Thrown out of a call before it computes anything."""


class _Intercept(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the first op that is called, and what with, and does not run it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.call: tuple[OpOverload, tuple[Any, ...], dict[str, Any]] | None = None

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.call = func, args, kwargs or {}
        raise _Reached


def binding(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """A function of torch that calls `op` with `args` and `kwargs` when it is called with them; else `op` itself."""
    return next((found for found in _candidates(op) if _calls(found, op, args, kwargs)), op)


def _candidates(op: OpOverload) -> Iterator[Callable[..., Any]]:
    namespace, _, name = op._schema.name.partition("::")
    if namespace == "aten":
        yield from (getattr(owner, name) for owner in NAMESPACES if hasattr(owner, name))


def _calls(function: Callable[..., Any], op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    with _Intercept() as seen, suppress(_Reached, TypeError):  # TypeError: it takes other arguments
        function(*args, **kwargs)
    if seen.call is None or seen.call[0] is not op:
        return False
    ours, theirs = tree_flatten((tuple(args), kwargs)), tree_flatten(seen.call[1:])
    return ours[1] == theirs[1] and all(_same(a, b) for a, b in zip(ours[0], theirs[0], strict=True))


def _same(a: Any, b: Any) -> bool:
    return a is b if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) else type(a) is type(b) and a == b
