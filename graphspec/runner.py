"""The device owner: stream, model, KV cache, slot state. Nothing else touches the device."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from attention import KVLayout, allocate_kv_cache, create_backend
from graphs import (
    Audit,
    BucketLadder,
    Event,
    GraphKey,
    GraphStore,
    PersistentBuffers,
    compile_static,
    create_stream,
    keep_compiled,
    record,
)
from graphs.capture import Output
from graphs.cuda import CudaCapture
from graphspec.config import ResolvedConfig
from graphspec.drafting import Drafter
from graphspec.iteration import DecodeInputs, Forward, Iteration, PrefillInputs
from graphspec.model import PagedModel
from graphspec.sampling import SAMPLERS
from graphspec.staging import StagedStep, StagingRing, StagingSizes, read_rows
from graphspec.state import SlotState, admit, allocate_state
from graphspec.stats import GraphStats
from graphspec.step import StepPlan, StepResult


@dataclass(frozen=True, eq=False)
class Launched:
    """A launch in flight: the plan it knew, the arrays its answer arrives in, and the event that says when."""

    plan: StepPlan
    staged: StagedStep
    event: Event

    def describe(self) -> dict[str, Any]:
        """The launch in JSON types, for `Engine.dump_state`."""
        prefill, decode = self.plan.prefill, self.plan.decode
        return {
            "step": self.plan.step,
            "answered": self.event.query(),
            "admitted_slots": [admission.slot for admission in self.plan.admissions],
            "prefill_slots": [] if prefill is None else prefill.slots.tolist(),
            "prefill_tokens": 0 if prefill is None else int(prefill.lengths.sum()),
            "decode_slots": [] if decode is None else decode.slots.tolist(),
            "num_draft": None if decode is None else decode.num_draft,
        }

    def result(self) -> StepResult:
        """Copy the answer. Call after `event.wait()`."""
        prefill, decode = self.plan.prefill, self.plan.decode
        return StepResult(
            prefill=None if prefill is None else read_rows(self.staged.prefill_output, len(prefill.slots)),
            decode=None if decode is None else read_rows(self.staged.decode_output, len(decode.slots)),
        )


@dataclass(frozen=True, eq=False)
class _Work:
    """What the stream needs for one launch."""

    plan: StepPlan
    staged: StagedStep
    prefill: PrefillInputs | None
    decode: DecodeInputs | None
    key: GraphKey | None  # of the decode step; without one, of an earlier launch


class Runner:
    """Launches plans. `launch` returns at once; stream order is admissions, prefill chunks, decode step, read-back."""

    def __init__(self, model: PagedModel, config: ResolvedConfig, drafter: Drafter, device: torch.device) -> None:
        user = config.user
        self.device = device
        self.ladder = BucketLadder.up_to(user.max_num_seqs)
        self._model = model
        backend = create_backend(user.attention_backend)
        model.bind(allocate_kv_cache(kv_layout(model, user.page_size, config.num_pages), device), backend)
        state = allocate_state(user.max_num_seqs, config.num_draft, config.history_width, device)
        compiled = user.compile if user.compile is not None else device.type == "cuda"
        forward: Forward = compile_static(model.forward) if compiled else model.forward
        self._prefill, self._decode = (
            Iteration(f, state, drafter, user.page_size, config.num_pages, config.max_model_len, model.facts.vocab_size)
            for f in (model.forward, forward)
        )
        sizes = StagingSizes(
            max_rows=user.max_num_seqs,
            max_prefill_tokens=user.max_prefill_tokens,
            table_width=config.table_width,
            num_draft=config.num_draft,
            scratch_slot=state.scratch_slot,
            scratch_page=config.num_pages,
        )
        self._ring = StagingRing(sizes, user.depth, pin=device.type == "cuda")
        self._state = state
        self.last_key: GraphKey | None = None
        # The static inputs every decode step reads: one set for all buckets, each bucket its leading rows.
        buffers = PersistentBuffers()
        self._inputs = allocate_inputs(buffers, user.max_num_seqs, config.table_width, device)
        register(buffers, state, model.kv_caches)
        self._enforce_eager, self._audit = user.enforce_eager, user.debug
        self.store = GraphStore(
            buffers,
            CudaCapture(device) if device.type == "cuda" else keep_compiled if compiled else record,
            self._fill_with_padding,
        )
        self._stream = create_stream(device)  # last: what was made so far is complete before its first work
        if not user.enforce_eager and (user.capture == "eager" or (user.capture == "auto" and device.type == "cuda")):
            self._stream.submit(lambda: self._capture_all(config.num_draft)).wait()

    def _capture_all(self, num_draft: int) -> None:
        """Every key there is, largest first, so that smaller graphs find their memory in the pool."""
        for key in decode_keys(self.ladder, num_draft):
            self._capture(key)

    def _capture(self, key: GraphKey) -> None:
        self.store.capture(key, lambda: self._step(key))

    def launch(self, plan: StepPlan) -> Launched:
        staged = self._ring.take()
        prefill = None if plan.prefill is None else staged.fill_prefill(plan.prefill)
        decode = None
        if plan.decode is not None:
            rows, k = self.ladder.pad(len(plan.decode.slots)), plan.decode.num_draft
            self.last_key = GraphKey("decode", rows, k, k, plan.decode.sampler)
            decode = staged.fill_decode(plan.decode, rows)
        work = _Work(plan, staged, prefill, decode, self.last_key)
        staged.event = self._stream.submit(lambda: self._run_audited(work))
        return Launched(plan, staged, staged.event)

    def _run_audited(self, work: _Work) -> None:
        """In debug mode, who writes which buffer is watched, and a violation fails the launch."""
        audit = Audit(self.store.buffers) if self._audit else nullcontext()
        with self.store.buffers.writing("step"), audit:
            self._run(work)
        if isinstance(audit, Audit):
            assert not audit.findings, audit.findings

    def _run(self, work: _Work) -> None:
        """Everything of one launch, on the stream."""
        plan, staged, decode, key = work.plan, work.staged, work.decode, work.key
        for admission in plan.admissions:
            admit(self._state, admission)
        if work.prefill is not None and plan.prefill is not None:
            on_device = PrefillInputs(*(t.to(self.device, non_blocking=True) for t in work.prefill))
            first = self._prefill.prefill(on_device, self._state.drafts.shape[1], plan.prefill.sampler)
            staged.prefill_output[: len(first)].copy_(first, non_blocking=True)
        if decode is not None and key is not None:
            if not self._enforce_eager and key not in self.store:
                self._capture(key)
            with self.store.buffers.writing("staging"):
                for static, new in zip(self._inputs, decode, strict=True):
                    static[: key.rows].copy_(new, non_blocking=True)
            out: Output
            if self._enforce_eager:
                out = self.store.run_off_graph(key, "eager_mode", lambda: self._step(key))
            else:
                out = self.store.replay(key)
            assert isinstance(out, torch.Tensor)
            staged.decode_output[: key.rows].copy_(out, non_blocking=True)

    def _step(self, key: GraphKey) -> torch.Tensor:
        """The function that is captured, for one key."""
        inputs = DecodeInputs(*(t[: key.rows] for t in self._inputs))
        return self._decode.decode(inputs, key.num_draft, key.sampler)

    def _fill_with_padding(self) -> None:
        """Make every row a padding row. Capturing runs a step for real; on padding it changes nothing that matters,
        and what it wrote to the scratch page is wiped."""
        with self.store.buffers.writing("staging"):
            self._inputs.row_slots.fill_(self._state.scratch_slot)
            self._inputs.block_tables.fill_(self._decode.scratch_page)
        for kv_cache in self._model.kv_caches:
            kv_cache[self._decode.scratch_page].zero_()

    def graph_stats(self) -> GraphStats:
        ledger = self.store.ledger()
        return GraphStats(dict(self.store.off_graph), len(ledger), sum(line.capture_seconds for line in ledger))

    def close(self) -> None:
        self._stream.close()
        self._model.close()


def kv_layout(model: PagedModel, page_size: int, num_pages: int) -> KVLayout:
    """The KV cache of `num_pages` pages and the scratch page behind them."""
    facts = model.facts
    return KVLayout(facts.num_layers, num_pages + 1, page_size, facts.num_kv_heads, facts.head_dim, facts.dtype)


def decode_keys(ladder: BucketLadder, num_draft: int) -> list[GraphKey]:
    """The keys that decode steps can have: the plan of an engine, largest batch first."""
    k = num_draft
    return [GraphKey("decode", rows, k, k, sampler) for rows in reversed(ladder.rungs) for sampler in SAMPLERS]


def allocate_inputs(buffers: PersistentBuffers, rows: int, width: int, device: torch.device) -> DecodeInputs:
    """The static inputs of decode steps, written by staging before every step."""
    shapes = {"row_slots": ((rows,), torch.int64), "block_tables": ((rows, width), torch.int32)}
    return DecodeInputs(
        **{
            name: buffers.allocate(f"inputs.{name}", shape, dtype, device, writer="staging", every_step=True)
            for name, (shape, dtype) in shapes.items()
        }
    )


def register(buffers: PersistentBuffers, state: SlotState, kv_caches: list[torch.Tensor]) -> None:
    """Name everything that steps update in place."""
    fields = {n: t for n, t in state._asdict().items() if isinstance(t, torch.Tensor)}
    fields |= {f"sampling.{n}": t for n, t in state.sampling._asdict().items()}
    for name, field in fields.items():
        buffers.add(f"state.{name}", field, writer="step")
    for layer, kv_cache in enumerate(kv_caches):
        buffers.add(f"kv.{layer}", kv_cache, writer="step")
