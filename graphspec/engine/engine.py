"""The engine: requests in, tokens out, one launch per step and one wait."""

from __future__ import annotations

import json
import logging
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn
from tqdm import tqdm
from transformers import AutoTokenizer

from graphs import StreamError, check_compiler
from graphspec.engine.input_processor import InputProcessor, Prompt
from graphspec.engine.resolve import DTYPES, free_memory, resolve, resolve_device
from graphspec.engine.stats import EngineStats, LoopTimes, snapshot
from graphspec.engine.watchdog import Watchdog
from graphspec.execution.runner import Launched, Runner
from graphspec.models.loading import draft_module, load_module, model_path, open_draft
from graphspec.models.packed_linears import check_batch_invariance, check_packing
from graphspec.models.paged_model import PagedModel
from graphspec.models.paging import kv_layout
from graphspec.models.vocabulary import shared_ids
from graphspec.records.acceptance import AcceptanceReport
from graphspec.records.config import EngineConfig
from graphspec.records.outputs import Completion, FinishReason, StepOutput, Usage
from graphspec.records.request import MAX_PRIORITY, Request, rank_of
from graphspec.records.sampling_params import SamplingParams
from graphspec.records.token_rules import TokenRules
from graphspec.scheduling.result_processor import Emission
from graphspec.scheduling.scheduler import Scheduler, SchedulerConfig

log = logging.getLogger(__name__)


class Engine:
    """Serves requests on one model with static 1 + k decode steps and a scheduler that runs ahead of the device.

    `model` is a transformers causal LM and belongs to the engine until `close`. Not thread-safe: one thread adds
    requests and calls `step`.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        *,
        draft_model: nn.Module | None = None,
    ) -> None:
        """`draft_model` is a causal LM that drafts, in the place of the one that `config.draft_model` names. For a
        module, and for an engine without a tokenizer, only the sizes of the two vocabularies can be compared.

        Raises ValueError, in one sentence, for models and configurations that cannot work, alone or together.
        """
        config = config or EngineConfig()
        device = next(model.parameters()).device
        check_machine(config, device)
        module = draft_module(config, model, draft_model)
        with ExitStack() as undo:
            paged = PagedModel(model)
            undo.callback(paged.close)
            shared = None if module is None else shared_ids(tokenizer, config.draft_model)
            draft = None if module is None else open_draft(module, paged, shared)
            if draft is not None:
                undo.callback(draft.close)
            self.config = resolve(
                config,
                model_limit=paged.facts.max_positions,
                page_bytes=sum(kv_layout(m, config.page_size, 1).page_bytes for m in (paged, draft) if m is not None),
                free_bytes=free_memory(device),
            )
            self._runner = Runner(paged, self.config, device, draft)
            undo.pop_all()
        drafter = self._runner.drafter
        self._input_processor = InputProcessor(tokenizer, paged.facts, self.config)
        self._synthetic = bool(drafter.forced_num_accepted)
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_prefill_tokens=config.max_prefill_tokens,
                tiers=self._runner.tiers,
                lookahead=drafter.lookahead(self.config.num_draft),
                page_size=config.page_size,
                num_pages=self.config.num_pages,
                table_width=self.config.table_width,
                reads_prompt=drafter.reads_prompt,
                drafts_ahead=drafter.drafts_ahead,
                pad=self._runner.graph_plan.ladder.pad,
            )
        )
        if config.adaptive_speculation:
            measured = self._runner.measure_steps()
            log.info("k is chosen among %s; steps measured as (rows, k, seconds): %s", self._runner.tiers, measured)
            for step in measured:
                self._scheduler.policy.costs.record_profiled(*step)
        self._in_flight: deque[Launched] = deque()
        self._requests: dict[str, list[Request]] = {}  # completions that have not ended
        self._undelivered: list[StepOutput] = []
        self._seeds = random.Random(config.seed)
        self._num_added = self._num_arrived = 0  # requests, completions
        self._times = LoopTimes()
        self._watchdog = Watchdog(config.watchdog_seconds, self._report) if config.watchdog_seconds else nullcontext()
        self._failure: StreamError | None = None
        self._closed = False

    @classmethod
    def from_pretrained(cls, model: str, config: EngineConfig | None = None) -> Engine:
        """An engine for `model`: "smollm2-135m" (built in), a local folder in Hugging Face layout, or a hub id.

        Raises ValueError, in one sentence, for a model that cannot be loaded or run and for a configuration that
        cannot work. dtype "auto" means float32 on the CPU and the checkpoint's dtype on CUDA.
        """
        config = config or EngineConfig()
        device = resolve_device(config.device)
        dtype = DTYPES.get(config.dtype, torch.float32 if device.type == "cpu" else None)
        check_machine(config, device)
        module = load_module(model, dtype, device)
        return cls(module, AutoTokenizer.from_pretrained(model_path(model)), config)

    # Requests.

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0, cache_salt: str = ""
    ) -> str:
        """Queue a request and return its id, which its `n` completions share.

        Requests of smaller `priority` are served first, equal ones first come first served. A cached prefix is only
        shared between requests of equal `cache_salt`.

        `prompt` is text, token ids, or chat messages (`{"role": ..., "content": ...}`), which go through the
        tokenizer's chat template. Raises ValueError before anything is touched if the prompt is empty, holds an id
        outside the vocabulary, leaves no room below max_model_len, or could never fit the KV pool.
        """
        params = params or SamplingParams()
        token_ids, rules = self._read(prompt, params)
        if not -MAX_PRIORITY < priority < MAX_PRIORITY:
            raise ValueError(f"priority must lie between -2**20 and 2**20, got {priority}")
        return self._enqueue(token_ids, rules, params, priority, cache_salt)[0].request_id

    def _read(self, prompt: Prompt, params: SamplingParams) -> tuple[list[int], TokenRules]:
        """Token ids and rules of a request. Raises what `add_request` raises for it."""
        self._check_open()
        token_ids = self._input_processor.encode(prompt)
        return token_ids, self._input_processor.check(token_ids, params)

    def _enqueue(
        self, token_ids: list[int], rules: TokenRules, params: SamplingParams, priority: int = 0, cache_salt: str = ""
    ) -> list[Request]:
        """The completions of a request that was read. The first one that runs publishes the pages of the prompt, and
        the others find them in the prefix cache."""
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        completions = [
            Request(
                request_id=str(self._num_added),
                prompt_ids=token_ids,
                params=params if index == 0 else replace(params, prompt_logprobs=None),
                seed=seed,
                rank=rank_of(priority, self._num_arrived + index),
                limit=min(len(token_ids) + params.max_tokens, self.config.max_model_len),
                stop_ids=self._input_processor.stop_ids(params),
                index=index,
                rules=rules,
                cache_salt=cache_salt,
                text=self._input_processor.text_stream(params),
            )
            for index in range(params.n)
        ]
        self._num_added += 1
        self._num_arrived += params.n
        self._requests[completions[0].request_id] = list(completions)
        for completion in completions:
            self._scheduler.add(completion)
        return completions

    def abort(self, request_id: str) -> bool:
        """End a request now, with all its completions. Their last outputs, with finish reason "abort", come with the
        next `step`. False if there is no such unfinished request."""
        completions = list(self._requests.get(request_id, ()))
        for completion in completions:
            self._scheduler.abort(completion)
            self._undelivered.append(self._deliver(Emission(completion, [], "abort")))
        return bool(completions)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` still has something to return."""
        return bool(self._undelivered) or self._scheduler.has_requests()

    # The loop.

    def step(self) -> list[StepOutput]:
        """Launch one step and take the answers that are due; returns what became known in this call.

        The result may be empty while the pipeline fills. Raises `graphs.StreamError` if a launch failed.
        """
        self._check_open()
        started, waited = time.perf_counter(), 0.0
        plan = self._scheduler.next()
        if plan is not None:
            self._in_flight.append(self._runner.launch(plan))
        outputs, self._undelivered = self._undelivered, []
        idle = plan is None
        while self._in_flight and (len(self._in_flight) > self.config.user.depth or idle):
            idle = False
            done = self._in_flight.popleft()
            waited += self._wait(done)
            outputs += [self._deliver(e) for e in self._scheduler.commit(done.plan, done.result())]
        if self.config.user.debug:
            self._scheduler.check([launched.plan for launched in self._in_flight])
        self._times.host.append(time.perf_counter() - started - waited)
        return outputs

    def _wait(self, launched: Launched) -> float:
        """The only place where the host waits for the device. Returns the seconds it did."""
        started = time.perf_counter()
        try:
            with self._watchdog:
                launched.event.wait()
        except StreamError as failure:
            self._in_flight.appendleft(launched)
            self._failure = failure
            raise
        waited = time.perf_counter() - started
        idle = None if launched.plan.after_idle else launched.event.idle_before_seconds()
        self._times.record_launch(launched.event.busy_seconds(), idle)
        return waited

    def _deliver(self, emission: Emission) -> StepOutput:
        request, reason = emission.request, emission.finish_reason
        piece = ""
        if request.text is not None:
            if not request.params.stop:  # with stop strings the scheduler has read the text already
                request.text.accept(emission.token_ids)
            piece = request.text.take(final=reason is not None)
        unfinished = self._requests[request.request_id]
        if reason is not None:
            unfinished.remove(request)
            if not unfinished:
                del self._requests[request.request_id]
        is_first = len(request.output_ids) == len(emission.token_ids) > 0
        return StepOutput(
            request_id=request.request_id,
            index=request.index,
            new_token_ids=emission.token_ids,
            new_text=piece,
            finish_reason=reason,
            finished=not unfinished,
            logprobs=emission.logprobs,
            prompt_logprobs=request.prompt_logprobs if is_first and _scores_prompt(request) else None,
        )

    def drain(self) -> None:
        """Take the answers of all launches in flight. Outputs, if any, come with the next `step`."""
        self._check_open()
        while self._in_flight:
            done = self._in_flight.popleft()
            self._wait(done)
            self._undelivered += [self._deliver(e) for e in self._scheduler.commit(done.plan, done.result())]

    # Conveniences over the loop.

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Complete `prompts`, in order, with one set of parameters or one per prompt. Each gives `n` completions in a
        row. Shows a progress bar.

        If one prompt is refused (ValueError, see `add_request`), none is started. If the call is interrupted, its
        requests are aborted and the engine goes on.
        """
        every = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
        if len(every) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts need as many sampling parameters, got {len(every)}")
        read = [self._read(prompt, own) for prompt, own in zip(prompts, every, strict=True)]  # all, before any starts
        requests = [r for given, own in zip(read, every, strict=True) for r in self._enqueue(*given, own)]
        ids = {r.request_id for r in requests}
        try:
            self._run_until_finished(ids, progress)
        finally:
            for request_id in ids:
                self.abort(request_id)
            self._undelivered = [o for o in self._undelivered if o.request_id not in ids]
        return [self._completion(request) for request in requests]

    def _run_until_finished(self, ids: set[str], progress: bool) -> None:
        """Step until the requests `ids` have ended; outputs of others are kept for the next `step`."""
        others: list[StepOutput] = []
        unfinished, tokens, started = len(ids), 0, time.perf_counter()
        with tqdm(total=unfinished, desc="requests", disable=not progress, unit="req") as bar:
            while unfinished:
                for output in self.step():
                    if output.request_id not in ids:
                        others.append(output)
                        continue
                    tokens += len(output.new_token_ids)
                    unfinished -= output.finished
                    bar.update(output.finished)
                rate = tokens / (time.perf_counter() - started)
                bar.set_postfix_str(f"{rate:.1f} tokens/s", refresh=False)
        self._undelivered += others

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StepOutput]:
        """Yield the outputs of one request as they come. Closing the iterator early aborts the request."""
        request_id = self.add_request(prompt, params)
        return self._outputs_of(request_id)

    def _outputs_of(self, request_id: str) -> Iterator[StepOutput]:
        try:
            while request_id in self._requests:
                outputs = self.step()
                self._undelivered += [o for o in outputs if o.request_id != request_id]
                yield from (o for o in outputs if o.request_id == request_id)
        finally:
            if self.abort(request_id):
                self._undelivered = [o for o in self._undelivered if o.request_id != request_id]

    def _completion(self, request: Request) -> Completion:
        reason: FinishReason | None = request.finish_reason
        assert reason is not None
        return Completion(
            request_id=request.request_id,
            token_ids=request.output_ids,
            text="" if request.text is None else request.text.text,
            finish_reason=reason,
            usage=Usage(len(request.prompt_ids), len(request.output_ids)),
            seed=request.seed,
            num_decode_steps=request.num_decode_steps,
            num_off_graph_steps=request.num_off_graph_steps,
            synthetic=self._synthetic,
            index=request.index,
            logprobs=None if request.params.logprobs is None else request.logprobs,
            prompt_logprobs=request.prompt_logprobs if _scores_prompt(request) else None,
            acceptance=None if request.acceptance is None else request.acceptance.report(),
        )

    # State.

    def stats(self) -> EngineStats:
        """Counters and times since the engine was created."""
        scheduler, graphs = self._scheduler, self._runner.graph_stats()
        return snapshot(
            scheduler.stats,
            self._times,
            graphs,
            scheduler.num_running,
            len(scheduler.waiting),
            scheduler.pool.num_available,
        )

    def explain_acceptance(self) -> AcceptanceReport:
        """Where drafts were lost, and what another k would have given, since the engine was created.

        Raises ValueError unless `EngineConfig.explain_acceptance` is on and there are drafts.
        """
        if not self.config.explains_acceptance:
            raise ValueError("nothing was measured: set explain_acceptance=True and num_speculative_tokens above 0")
        return self._scheduler.acceptance.report()

    def step_costs(self) -> list[float]:
        """Measured seconds of a decode step for k = 0, 1 ... at the usual number of rows, for
        `AcceptanceReport.best_k`; between measured k by their number of tokens. Empty without adaptive speculation,
        which is what measures them."""
        return self._scheduler.policy.costs.at_usual_rows(self.config.num_draft)

    def dump_state(self) -> dict[str, Any]:
        """Queues, slots, launches in flight, pages and the last graph key, as JSON types: what to look at, or to send
        along, when something is stuck."""
        in_flight = [launched.describe() for launched in self._in_flight]
        return {**self._scheduler.describe(), "in_flight": in_flight, "last_graph_key": self._runner.last_key}

    def _report(self) -> str:
        return json.dumps(self.dump_state())

    def close(self) -> None:
        """Wait for launches in flight, release the device and give the model back. Closing twice is allowed."""
        if not self._closed:
            self._closed = True
            if isinstance(self._watchdog, Watchdog):
                self._watchdog.close()
            self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, launches in flight or not. Running requests go on undisturbed."""
        self._scheduler.reset_prefix_cache()

    @property
    def has_chat_template(self) -> bool:
        return self._input_processor.has_chat_template

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, as `add_request` would read it. Raises ValueError without the tokenizer it needs."""
        return self._input_processor.encode(prompt)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed: create a new one")
        if self._failure is not None:
            raise StreamError("the engine failed earlier: look at dump_state() and create a new one") from self._failure


def check_machine(config: EngineConfig, device: torch.device) -> None:
    """Raise, in one sentence and before anything is loaded, if this machine cannot do what `config` asks for."""
    if config.compile:
        check_compiler(device)
    if config.pack_weights:
        check_packing(device)
    if config.batch_invariant:
        check_batch_invariance(device)


def _scores_prompt(request: Request) -> bool:
    return request.params.prompt_logprobs is not None and not request.wants_prompt_logprobs
