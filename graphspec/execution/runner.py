"""The device owner: stream, model, KV cache, slot state. Nothing else touches the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from attention import Bucket
from graphs import (
    Audit,
    BucketLadder,
    Event,
    GraphKey,
    GraphPlan,
    RegionCompiler,
    create_backend,
    create_stream,
)
from graphspec.drafting import Drafter, create_drafter
from graphspec.execution.decode_step import DecodeStep
from graphspec.execution.iteration import DecodeInputs, Iteration, PrefillInputs, StepTensors
from graphspec.execution.slot_state import admit, allocate_state
from graphspec.execution.staging import StagedStep, StagingRing, StagingSizes, read_rows
from graphspec.models.packed_linears import PackedLinears, check_invariant_model, packed_linears
from graphspec.models.paged_model import PagedModel
from graphspec.models.paging import Paging, attach_kv
from graphspec.records.config import EngineConfig, ResolvedConfig
from graphspec.records.launch import DecodeRows, PrefillRows, RowResults, StepPlan, StepResult
from graphspec.records.sampling_params import kind_parts
from graphspec.sampling.keyed_sampling import BASES, SAMPLERS
from graphspec.sampling.logprobs import logprob_width, read_logprobs
from graphspec.sampling.rejection import REJECTION

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Launched:
    """A launch in flight: the plan it knew, the arrays its answer arrives in, and the event that says when."""

    plan: StepPlan
    staged: StagedStep
    event: Event
    off_graph: str  # why the decode step replays no captured graph; "" if it does

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
        prefill, decode, staged, width = self.plan.prefill, self.plan.decode, self.staged, self.staged.width
        num_scored = 0 if prefill is None else int(prefill.num_scored.sum())
        return StepResult(
            prefill=None if prefill is None else _read(prefill, staged.prefill_output, staged.prefill_logprobs, 1),
            decode=None if decode is None else _read(decode, staged.decode_output, staged.decode_logprobs, width),
            off_graph=self.off_graph,
            seconds=self._seconds_of_decode(),
            prompt_logprobs=read_logprobs(staged.prompt_logprobs[:num_scored].numpy()) if num_scored else None,
        )

    def _seconds_of_decode(self) -> float | None:
        plan = self.plan
        alone = plan.prefill is None and plan.catch_up is None and not plan.admissions and not self.staged.captured
        return self.event.busy_seconds() if alone else None


def _read(rows: PrefillRows | DecodeRows, output: torch.Tensor, logprobs: torch.Tensor, width: int) -> RowResults:
    return read_rows(output, len(rows.slots), width, logprobs if kind_parts(rows.sampler).logprobs else None)


@dataclass(frozen=True, eq=False)
class _Work:
    """What the stream needs for one launch."""

    plan: StepPlan
    staged: StagedStep
    chunks: PrefillInputs | None  # of prompts, or of what the drafter has to catch up with
    decode: DecodeInputs | None
    key: GraphKey | None  # of the decode step; without one, of an earlier launch


class Runner:
    """Launches plans. `launch` returns at once; stream order is admissions, prefill chunks, decode step, read-back."""

    def __init__(
        self, model: PagedModel, config: ResolvedConfig, device: torch.device, draft: PagedModel | None = None
    ) -> None:
        user = config.user
        self.device = device
        self._model, self._draft = model, draft
        self._attention = attach_kv(model, config, device)
        paging = Paging(user.page_size, config.num_pages, config.max_model_len)
        vocab_size = model.facts.vocab_size
        self.drafter = create_drafter(config, draft, paging, vocab_size, device)
        self.tiers = usable_tiers(config.tiers, self.drafter)
        self.graph_plan = graph_plan(user, self.tiers, self.drafter.drafts_ahead)
        self._state = allocate_state(user.max_num_seqs, config.num_draft, config.history_width, vocab_size, device)
        self._iteration = Iteration(
            model=model,
            attention=self._attention,
            state=self._state,
            drafter=self.drafter,
            paging=paging,
            vocab_size=vocab_size,
            explains=config.explains_acceptance,
        )
        sizes = StagingSizes(
            max_rows=user.max_num_seqs,
            max_prefill_tokens=user.max_prefill_tokens,
            table_width=config.table_width,
            num_draft=config.num_draft,
            scratch_slot=self._state.scratch_slot,
            scratch_page=config.num_pages,
            logprob_width=logprob_width(vocab_size),
            rejection_width=REJECTION if config.explains_acceptance else 0,
        )
        self._ring = StagingRing(sizes, user.depth, pin=device.type == "cuda")
        self.last_key: GraphKey | None = None
        self._off_graph = "eager_mode" if user.enforce_eager else ""
        self._audit = user.debug
        compiled = user.compile if user.compile is not None else device.type == "cuda"
        self._compiler = RegionCompiler() if compiled else None
        for each in (model, draft):
            if each is not None and (packed := packed_linears(user, device, each.linears)) is not None:
                each.mode = packed
        if user.batch_invariant:  # of what is drafted, nothing depends but the speed
            assert isinstance(model.mode, PackedLinears)
            check_invariant_model(model.mode, model.num_other_products)
        self.decode_step = DecodeStep(
            self._iteration,
            model.kv_caches,
            buckets=decode_buckets(self.graph_plan),
            table_width=config.table_width,
            backend=create_backend(device, self._compiler),
        )
        self._stream = create_stream(device)  # last: what was made so far is complete before its first work
        try:
            if samplers := captured_at_start(user, device):
                at_start = replace(self.graph_plan, samplers=samplers)
                self.on_stream(lambda: self._capture(at_start, user.self_test))
        except BaseException:
            self._stream.close()
            raise

    def _capture(self, graphs: GraphPlan, self_test: bool) -> None:
        """All of `graphs`, so that none of them is captured or compiled later."""
        step = self.decode_step
        for key in graphs.all_keys():
            step.capture(key)
        graphs.check(step.store)
        found = [finding for key in graphs.all_keys() if self_test for finding in step.self_test(key)]
        if found:
            raise RuntimeError(f"the self test of the graphs found {len(found)} faults: {'; '.join(found[:3])}")

    def launch(self, plan: StepPlan) -> Launched:
        staged = self._ring.take()
        rows = plan.prefill or plan.catch_up
        chunks = None if rows is None else staged.fill_prefill(rows)
        decode = None
        if plan.decode is not None:
            consumed = plan.decode.num_draft
            self.last_key = self.graph_plan.key(
                len(plan.decode.slots), consumed, plan.num_draft_next, plan.decode.sampler
            )
            decode = staged.fill_decode(plan.decode, self.last_key.rows)
        work = _Work(plan, staged, chunks, decode, self.last_key)
        staged.event = self._stream.submit(lambda: self._run_audited(work))
        return Launched(plan, staged, staged.event, self._off_graph)

    def _run_audited(self, work: _Work) -> None:
        """In debug mode, who writes which buffer is watched, and a violation fails the launch."""
        buffers = self.decode_step.buffers
        audit = Audit(buffers) if self._audit else nullcontext()
        with buffers.writing("step"), audit:
            self._run(work)
        if isinstance(audit, Audit):
            assert not audit.findings, audit.findings

    def _run(self, work: _Work) -> None:
        """Everything of one launch, on the stream."""
        plan, staged, decode, key = work.plan, work.staged, work.decode, work.key
        for admission in plan.admissions:
            admit(self._state, admission)
        if work.chunks is not None:
            self._run_chunks(plan, staged, work.chunks)
        if decode is not None and key is not None:
            staged.captured = not self._off_graph and key not in self.decode_step.store
            out = self.decode_step.run(key, decode, self._off_graph)
            _copy_rows((staged.decode_output, staged.decode_logprobs), out)

    def _run_chunks(self, plan: StepPlan, staged: StagedStep, chunks: PrefillInputs) -> None:
        host_plan = (chunks.block_tables, chunks.seq_lens, chunks.query_start)
        self.drafter.plan_prefill(*host_plan)
        on_device = PrefillInputs(*(t.to(self.device, non_blocking=True) for t in chunks))
        if plan.prefill is None:
            self._iteration.catch_up(on_device)
            return
        self._attention.plan_prefill(*host_plan)
        first, scored = self._iteration.prefill(on_device, plan.num_draft_next, plan.prefill.sampler)
        _copy_rows((staged.prefill_output, staged.prefill_logprobs), first)
        if scored is not None:
            _copy_rows((staged.prompt_logprobs,), (scored,))

    def measure_steps(self, repeats: int = 3) -> list[tuple[int, int, float]]:
        """(rows, k, seconds) of greedy decode steps on padding: of the smallest and the largest batch with every k, and
        of every other step that has its graph already. Best of a few."""
        plan, steps = self.graph_plan, self.decode_step
        staying = {k: (k, k_next) for k, k_next in sorted(plan.drafts, key=lambda pair: pair[0] == pair[1])}
        ends = [plan.key(rows, *pair, "greedy") for rows in (1, plan.max_batch) for pair in staying.values()]
        if not self._off_graph:
            self.on_stream(lambda: [steps.capture(key) for key in dict.fromkeys(ends) if key not in steps.store])
        greedy = [key for key in plan.all_keys() if key.sampler == "greedy" and key in steps.store]
        keys = list(dict.fromkeys((*ends, *greedy)))
        taken = self.rehearse(keys, repeats)
        return [(key.rows, key.num_draft, min(taken[key])) for key in keys]

    def rehearse(self, keys: Sequence[GraphKey], repeats: int) -> dict[GraphKey, list[float]]:
        """Device seconds of steps on padding, which take turns, so that drift of the machine meets all alike."""
        work = {key: partial(self.decode_step.rehearse, key) for key in keys}
        events = [(key, self._stream.submit(work[key])) for _ in range(repeats) for key in keys]
        events[-1][1].wait()
        return {key: [event.busy_seconds() for own, event in events if own == key] for key in keys}

    def on_stream(self, work: Callable[[], T]) -> T:
        """Run `work` where all device work runs, in order with it, wait, and return what it returns."""
        results: list[T] = []
        self._stream.submit(lambda: results.append(work())).wait()
        return results[0]

    def constants(self) -> list[torch.Tensor]:
        """What captured steps read and nobody writes: the weights, for `graphs.CaptureGuard`."""
        modules = [model.module for model in (self._model, self._draft) if model is not None]
        return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]

    def graph_stats(self) -> GraphStats:
        store = self.decode_step.store
        return GraphStats(
            off_graph_reasons=dict(store.off_graph),
            num_graphs=len(store),
            capture_seconds=sum(line.capture_seconds for line in store.ledger()),
            num_compiled_regions=0 if self._compiler is None else self._compiler.num_compiled,
        )

    def close(self) -> None:
        self._stream.close()
        self._model.close()
        if self._draft is not None:
            self._draft.close()


def _copy_rows(host: Iterable[torch.Tensor], device: StepTensors) -> None:
    """Read back what a step returned: leading rows of as many host arrays as there are outputs."""
    for target, source in zip(host, device, strict=False):
        target[: len(source)].copy_(source, non_blocking=True)


def usable_tiers(tiers: tuple[int, ...], drafter: Drafter) -> tuple[int, ...]:
    """The k that steps may have. A drafter that needs every step's hidden states is left out of none."""
    needs_all = bool(drafter.hidden_layers) and not drafter.drafts_ahead
    return tuple(k for k in tiers if k or not needs_all)


def graph_plan(user: EngineConfig, tiers: tuple[int, ...], drafts_ahead: bool) -> GraphPlan:
    """Every graph the decode steps of an engine can ask for, see `Scheduler`: k changes from any tier to any other if
    all drafts are always proposed, and else to a neighbouring one. Raises ValueError for rungs that leave holes."""
    ladder = BucketLadder.up_to(user.max_num_seqs) if user.graph_rows is None else BucketLadder(user.graph_rows)
    drafts = [(k, tiers[-1]) for k in tiers]
    if not drafts_ahead:
        drafts = [(a, b) for i, a in enumerate(tiers) for b in tiers[max(0, i - 1) : i + 2]]
    return GraphPlan(ladder, user.max_num_seqs, tuple(drafts), SAMPLERS)


def decode_buckets(plan: GraphPlan) -> list[Bucket]:
    """The shapes that decode steps can have, largest batch last."""
    tiers = sorted({k for k, _ in plan.drafts})
    return [Bucket(rows, 1 + k) for k in tiers for rows in plan.ladder.rungs]


def captured_at_start(user: EngineConfig, device: torch.device) -> tuple[str, ...]:
    """The kinds of samplers whose graphs are captured before serving."""
    if user.enforce_eager:
        return ()
    if user.capture == "eager" or user.self_test:
        return SAMPLERS
    return BASES if user.capture == "auto" and device.type == "cuda" else ()


@dataclass(frozen=True)
class GraphStats:
    """What became of decode steps."""

    off_graph_reasons: dict[str, int]
    num_graphs: int
    capture_seconds: float
    num_compiled_regions: int
