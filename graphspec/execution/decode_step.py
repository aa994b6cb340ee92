"""The decode step as graphs see it: its static inputs, one captured function per key, and what padding rows own."""

from __future__ import annotations

from typing import Any

import torch

from attention import Bucket
from graphs import Backend, CapturedGraph, GraphKey, GraphStore, PersistentBuffers, compare_replay, poison
from graphspec.execution.iteration import DecodeInputs, Iteration, StepTensors
from graphspec.execution.slot_state import SlotState


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
        self._iteration, drafter = iteration, iteration.drafter
        rows = max(bucket.rows for bucket in buckets)
        self.inputs = _allocate_inputs(buffers, rows, table_width, iteration.state.computed.device)
        iteration.attention.plan(buckets, self.inputs.block_tables)
        drafter.plan(buckets, table_width)
        own = drafter.buffers()
        self._by_page = {f"kv.{layer}": kv_cache for layer, kv_cache in enumerate(kv_caches)}
        self._by_page |= {f"drafter.{name}": tensor for name, tensor in own.by_page.items()}
        self._by_slot = _state_fields(iteration.state)
        self._by_slot |= {f"drafter.{name}": tensor for name, tensor in own.by_slot.items()}
        self._shared = {f"drafter.{name}": tensor for name, tensor in own.shared.items()}
        scratch = {f"attention.{name}": tensor for name, tensor in iteration.attention.buffers().items()}
        scratch |= {f"drafter.{name}": tensor for name, tensor in own.scratch.items()}
        for name, tensor in (self._by_slot | self._by_page | self._shared | scratch).items():
            buffers.add(name, tensor, writer="step")
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
        return self._iteration.decode(inputs, key.num_draft, key.num_draft_next, key.sampler)

    def stage(self, staged: DecodeInputs) -> None:
        """Copy R rows into the static inputs."""
        with self.buffers.writing("staging"):
            for static, new in zip(self.inputs, staged, strict=True):
                static[: len(new)].copy_(new, non_blocking=True)

    def capture(self, key: GraphKey) -> CapturedGraph:
        return self.store.capture(key, lambda: self.step(key))

    def rehearse(self, key: GraphKey) -> None:
        """Run the step on nothing but padding, uncounted: what it costs, for steps that were not run yet."""
        self.fill_with_padding()
        if key in self.store:
            self.store[key].program.run()
        else:
            self.step(key)

    def fill_with_padding(self) -> None:
        """Make every row a padding row. Capturing runs a step for real; on padding it changes nothing that matters,
        and what it wrote to the scratch page is wiped."""
        with self.buffers.writing("staging"):
            self.inputs.row_slots.fill_(self._iteration.state.scratch_slot)
            self.inputs.block_tables.fill_(self._iteration.paging.scratch_page)
        for paged in self._by_page.values():
            paged[self._iteration.paging.scratch_page].zero_()

    def padding(self) -> dict[str, Any]:
        """Buffers, and the index of what in them belongs to padding rows and may hold anything. (Computed counts are
        not among it: every step leaves the one of the scratch slot at zero.)"""
        owned: dict[str, Any] = dict.fromkeys(
            self._by_slot.keys() - {"state.computed"}, self._iteration.state.scratch_slot
        )
        owned |= dict.fromkeys(self._by_page, self._iteration.paging.scratch_page)
        return owned | dict.fromkeys(self._shared, -1)

    def self_test(self, key: GraphKey) -> list[str]:
        """Check one graph while nothing is served yet: on one row of slot 0 and padding for the rest, replay against
        eager, and garbage in the padding. Returns one sentence per finding and leaves everything as it was."""
        graph, paging = self.store[key], self._iteration.paging
        drafter = self._iteration.drafter
        reach = 2 + key.num_draft + drafter.lookahead(key.num_draft_next)  # the newest token, and drafting
        pages = list(range(min(paging.scratch_page, -(-reach // paging.page_size))))
        self.fill_with_padding()
        self.inputs.row_slots[0] = 0
        self.inputs.block_tables[0, : len(pages)] = torch.tensor(pages)
        parts = dict.fromkeys(self._by_page, torch.tensor([*pages, paging.scratch_page]))
        found = poison(graph, self.padding(), lambda outputs: [out[:1] for out in outputs], parts=parts)
        if graph.program.source is not None:
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


def _state_fields(state: SlotState) -> dict[str, torch.Tensor]:
    """Everything that steps update in place and that has one row per slot, by name."""
    fields = {n: t for n, t in state._asdict().items() if isinstance(t, torch.Tensor)}
    for group in ("sampling", "processors"):
        fields |= {f"{group}.{name}": tensor for name, tensor in getattr(state, group)._asdict().items()}
    return {f"state.{name}": tensor for name, tensor in fields.items()}
