"""Static tensors that captured graphs read and write: named, with one declared writer each, addresses frozen."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

CANARY, CANARY_BYTES = 0xA5, 256  # a multiple of every alignment that kernels ask for


class BufferError(RuntimeError):
    """A persistent buffer was moved, redefined, or written by somebody other than its declared writer."""


@dataclass(frozen=True)
class TensorSpec:
    """What a graph baked about one tensor."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    address: int

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> TensorSpec:
        return TensorSpec(name, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.data_ptr())

    def difference(self, tensor: torch.Tensor) -> str | None:
        """In words, what about `tensor` is not as it was; None if nothing changed. Runs before every replay."""
        if (
            tensor.data_ptr() == self.address
            and tensor.shape == self.shape
            and tensor.stride() == self.stride
            and tensor.dtype is self.dtype
        ):
            return None
        now = TensorSpec.of(self.name, tensor)
        if now.address != self.address:
            return f'"{self.name}" moved from {self.address:#x} to {now.address:#x}'
        field = next(field for field in ("shape", "stride", "dtype") if getattr(now, field) != getattr(self, field))
        return f'{field} of "{self.name}" was {getattr(self, field)} and is {getattr(now, field)}'


class PersistentBuffers(Mapping[str, torch.Tensor]):
    """Named static tensors. Each has one declared writer per step; after `freeze` none may be added or replaced."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._writers: dict[str, str] = {}
        self._every_step: set[str] = set()
        self._guarded: dict[str, torch.Tensor] = {}
        self._specs: dict[str, TensorSpec] | None = None
        self.part = ""  # the part of a step that is running now, see `Audit`
        self.on_replay: Callable[[Hashable, tuple[torch.Tensor, ...]], None] | None = None  # set by an `Audit`

    def allocate(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, writer: str, **kind: bool
    ) -> torch.Tensor:
        """A new zeroed buffer with canary words before and behind it (`check_canaries`). See `add`."""
        size = math.prod(shape) * dtype.itemsize
        guarded = torch.full((size + 2 * CANARY_BYTES,), CANARY, dtype=torch.uint8, device=device)
        self._guarded[name] = guarded
        tensor = guarded[CANARY_BYTES : CANARY_BYTES + size].view(dtype).view(shape)
        return self.add(name, tensor.zero_(), writer=writer, **kind)

    def check_canaries(self) -> None:
        """Raise BufferError, naming it, if something was written just outside an allocated buffer. Reads them back."""
        for name, guarded in self._guarded.items():
            ends = torch.cat((guarded[:CANARY_BYTES], guarded[-CANARY_BYTES:]))
            if not bool((ends == CANARY).all()):
                raise BufferError(f'something wrote past the ends of "{name}"')

    def add(self, name: str, tensor: torch.Tensor, *, writer: str, every_step: bool = False) -> torch.Tensor:
        """Register `tensor` under `name`; `writer` names the one part of a step that writes it, and `every_step` says
        that what the step before left in it means nothing.

        Raises BufferError if the name is taken or the buffers are frozen.
        """
        if self._specs is not None:
            raise BufferError(f'"{name}" is added after the first capture: graphs could not know it')
        if name in self._tensors:
            raise BufferError(f'there is a buffer "{name}" already')
        self._tensors[name] = tensor
        self._writers[name] = writer
        if every_step:
            self._every_step.add(name)
        return tensor

    @contextmanager
    def writing(self, part: str) -> Iterator[None]:
        """Everything inside is done by `part` of a step. Costs nothing unless an `Audit` listens."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def writer(self, name: str) -> str:
        return self._writers[name]

    def is_written_every_step(self, name: str) -> bool:
        return name in self._every_step

    def freeze(self) -> None:
        """Fix all addresses. Called by the first capture."""
        if self._specs is None:
            self._specs = {name: TensorSpec.of(name, tensor) for name, tensor in self._tensors.items()}

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        """Put another tensor in the place of a buffer. Raises BufferError once addresses are frozen."""
        if self._specs is not None:
            raise BufferError(f'"{name}" cannot be replaced: captured graphs hold its address; write into it instead')
        self._tensors[name] = tensor

    def verify(self) -> None:
        """Raise BufferError if a frozen buffer is not where, or not what, it was."""
        for name, spec in (self._specs or {}).items():
            if (changed := spec.difference(self._tensors[name])) is not None:
                raise BufferError(f"{changed}: write into the tensor, do not reallocate or resize it")

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._tensors.values())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
