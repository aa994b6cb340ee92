"""Functions that are named, not passed: `module:name`, as a command line can say it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves

from graphs.buffers import PersistentBuffers
from graphs.capture import Output
from graphs.guard import CaptureGuard, Finding


@dataclass(frozen=True)
class NamedFunction:
    """A function without arguments, and the tensors of its module that it may use."""

    call: Callable[[], Output]
    buffers: PersistentBuffers  # called BUFFERS in the module; none where it has none
    constants: tuple[torch.Tensor, ...]  # the parameters among the module's globals


def load_function(name: str) -> NamedFunction:
    """The function `module:name` of a module on Python's path, which is imported.

    Raises ValueError, in one sentence, if there is no such function. What the module itself raises is passed on.
    """
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ValueError(f'a function is named "module:name", such as my_module:step; got "{name}"')
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as caught:
        if caught.name is None or not f"{module}.".startswith(f"{caught.name}."):
            raise  # found, and it lacks something itself
        raise ValueError(f'there is no module "{module}" on the path: run where it lies, or set PYTHONPATH') from caught
    call = getattr(loaded, function, None)
    if not callable(call):
        raise ValueError(f'the module "{module}" has no function "{function}"')
    buffers = getattr(loaded, "BUFFERS", None)
    if buffers is not None and not isinstance(buffers, PersistentBuffers):
        raise ValueError(f"BUFFERS of {module} must be graphs.PersistentBuffers, not {type(buffers).__name__}")
    constants = tuple(t for t in tree_leaves(list(vars(loaded).values())) if isinstance(t, torch.nn.Parameter))
    return NamedFunction(call, buffers if buffers is not None else PersistentBuffers(), constants)


def guard_function(name: str) -> list[Finding]:
    """What would not survive capture in the function `module:name`, which is run twice. Raises what `load_function`
    raises."""
    function = load_function(name)
    return CaptureGuard(function.buffers, function.constants).inspect(function.call)
