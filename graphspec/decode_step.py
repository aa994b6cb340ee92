"""The decode step as graphs see it: its static inputs, one captured function per key, and what padding rows own."""

from __future__ import annotations

from typing import Any

import torch

from attention import AttentionBackend, Bucket
from graphs import Backend, CapturedGraph, GraphKey, GraphStore, PersistentBuffers, compare_replay, poison
from graphspec.iteration import DecodeInputs, Iteration, StepTensors
from graphspec.state import SlotState


class DecodeStep:
    """Decode steps of the given shapes. All methods run on the stream.

    The static inputs are one set for all keys: the graph of R rows reads their leading R rows.
    """

    def __init__(
        self,
        iteration: Iteration,
        kv_caches: list[torch.Tensor],
        *,
        buckets: list[Bucket],
        table_width: int,
        backend: Backend,
    ) -> None:
        buffers = PersistentBuffers()
        self._iteration = iteration
        self._kv_caches = {f"kv.{layer}": kv_cache for layer, kv_cache in enumerate(kv_caches)}
        rows = max(bucket.rows for bucket in buckets)
        self.inputs = _allocate_inputs(buffers, rows, table_width, iteration.state.computed.device)
        iteration.attention.plan(buckets, self.inputs.block_tables)
        _register(buffers, iteration.state, self._kv_caches, iteration.attention)
        self.store = GraphStore(buffers, backend, self.fill_with_padding)

    @property
    def buffers(self) -> PersistentBuffers:
        return self.store.buffers

    def run(self, key: GraphKey, staged: DecodeInputs, off_graph: str) -> StepTensors:
        """Stage the inputs and run the step: on its graph, which is captured now if it is new, or off graph for the
        given reason. The next step may overwrite what it returns."""
        if not off_graph and key not in self.store:
            self.capture(key)
        self.stage(staged)
        out = self.store.run_off_graph(key, off_graph, lambda: self.step(key)) if off_graph else self.store.replay(key)
        assert isinstance(out, tuple)
        return out

    def step(self, key: GraphKey) -> StepTensors:
        """The function that is captured, for one key."""
        inputs = DecodeInputs(*(t[: key.rows] for t in self.inputs))
        return self._iteration.decode(inputs, key.num_draft, key.sampler)

    def stage(self, staged: DecodeInputs) -> None:
        """Copy R rows into the static inputs."""
        with self.buffers.writing("staging"):
            for static, new in zip(self.inputs, staged, strict=True):
                static[: len(new)].copy_(new, non_blocking=True)

    def capture(self, key: GraphKey) -> CapturedGraph:
        return self.store.capture(key, lambda: self.step(key))

    def fill_with_padding(self) -> None:
        """Make every row a padding row. Capturing runs a step for real; on padding it changes nothing that matters,
        and what it wrote to the scratch page is wiped."""
        with self.buffers.writing("staging"):
            self.inputs.row_slots.fill_(self._iteration.state.scratch_slot)
            self.inputs.block_tables.fill_(self._iteration.scratch_page)
        for kv_cache in self._kv_caches.values():
            kv_cache[self._iteration.scratch_page].zero_()

    def padding(self) -> dict[str, Any]:
        """Buffers, and the index of what in them belongs to padding rows and may hold anything. (Computed counts are
        not among it: every step leaves the one of the scratch slot at zero.)"""
        scratch = self._iteration.state.scratch_slot
        owned: dict[str, Any] = {n: scratch for n in self.buffers if n.startswith("state.") and n != "state.computed"}
        return owned | dict.fromkeys(self._kv_caches, self._iteration.scratch_page)

    def self_test(self, key: GraphKey) -> list[str]:
        """Check one graph while nothing is served yet: on one row of slot 0 and padding for the rest, replay against
        eager, and garbage in the padding. Returns one sentence per finding and leaves everything as it was."""
        graph, iteration = self.store[key], self._iteration
        pages = list(range(min(iteration.scratch_page, -(-(1 + key.num_draft) // iteration.page_size))))
        self.fill_with_padding()
        self.inputs.row_slots[0] = 0
        self.inputs.block_tables[0, : len(pages)] = torch.tensor(pages)
        parts = dict.fromkeys(self._kv_caches, torch.tensor([*pages, iteration.scratch_page]))
        found = poison(graph, self.padding(), lambda outputs: [out[:1] for out in outputs], parts=parts)
        # A compiled record has no bit-equal oracle, and a CUDA graph of compiled code is compared with that code.
        if not getattr(graph.program, "rewritten", False):
            difference = compare_replay(graph, parts=parts)
            found += [] if difference is None else [str(difference)]
        self.buffers.check_canaries()
        self.fill_with_padding()
        return [f"{key}: {finding}" for finding in found]


def _allocate_inputs(buffers: PersistentBuffers, rows: int, width: int, device: torch.device) -> DecodeInputs:
    """The static inputs, written by staging before every step."""
    shapes = {"row_slots": ((rows,), torch.int64), "block_tables": ((rows, width), torch.int32)}
    return DecodeInputs(
        **{
            name: buffers.allocate(f"inputs.{name}", shape, dtype, device, writer="staging", every_step=True)
            for name, (shape, dtype) in shapes.items()
        }
    )


def _register(
    buffers: PersistentBuffers, state: SlotState, kv_caches: dict[str, torch.Tensor], attention: AttentionBackend
) -> None:
    """Name everything that steps update in place."""
    fields = {n: t for n, t in state._asdict().items() if isinstance(t, torch.Tensor)}
    for group in ("sampling", "processors"):
        fields |= {f"{group}.{name}": tensor for name, tensor in getattr(state, group)._asdict().items()}
    scratch = {f"attention.{n}": t for n, t in attention.buffers().items()}
    for name, tensor in ({f"state.{n}": t for n, t in fields.items()} | kv_caches | scratch).items():
        buffers.add(name, tensor, writer="step")
