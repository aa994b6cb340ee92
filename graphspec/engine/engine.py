"""The engine: requests in, tokens out, one launch per step and one wait."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import nn
from tqdm import tqdm
from transformers import AutoTokenizer

from graphspec.engine.build import build
from graphspec.engine.input_processor import InputProcessor, Prompt
from graphspec.engine.launch_pipeline import LaunchPipeline
from graphspec.engine.output_processor import OutputProcessor
from graphspec.engine.resolve import DTYPES, check_machine, resolve_device
from graphspec.engine.stats import EngineStats, snapshot
from graphspec.engine.watchdog import Watchdog
from graphspec.models.loading import load_module, model_path
from graphspec.records.acceptance import AcceptanceReport
from graphspec.records.config import EngineConfig
from graphspec.records.outputs import Completion, StepOutput
from graphspec.records.request import Request
from graphspec.records.sampling_params import SamplingParams
from graphspec.scheduling.result_processor import Emission


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
        parts = build(model, tokenizer, config or EngineConfig(), draft_model)
        self.config, self._runner, self._scheduler = parts.config, parts.runner, parts.scheduler
        seconds = self.config.user.watchdog_seconds
        self._input_processor = InputProcessor(tokenizer, parts.facts, self.config)
        self._output_processor = OutputProcessor(synthetic=bool(self._runner.drafter.forced_num_accepted))
        self._pipeline = LaunchPipeline(self._runner, Watchdog(seconds, self._report) if seconds else None)
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
        self._check_open()
        given = self._input_processor.process(prompt, params or SamplingParams())
        return self._add(self._input_processor.completions(given, priority=priority, cache_salt=cache_salt))

    def _add(self, completions: list[Request]) -> str:
        """Queue the completions of one request."""
        self._output_processor.open(completions)
        for completion in completions:
            self._scheduler.add(completion)
        return completions[0].request_id

    def abort(self, request_id: str) -> bool:
        """End a request now, with all its completions. Their last outputs, with finish reason "abort", come with the
        next `step`. False if there is no such unfinished request."""
        completions = list(self._output_processor.unfinished.get(request_id, ()))
        for completion in completions:
            self._scheduler.abort(completion)
            self._output_processor.hold([self._output_processor.process(Emission(completion, [], "abort"))])
        return bool(completions)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` still has something to return."""
        return self._output_processor.has_held() or self._scheduler.has_requests()

    # The loop.

    def step(self) -> list[StepOutput]:
        """Launch one step and take the answers that are due; returns what became known in this call.

        The result may be empty while the pipeline fills. Raises `graphs.StreamError` if a launch failed.
        """
        self._check_open()
        with self._pipeline.host_work():
            plan = self._scheduler.next()
            if plan is not None:
                self._pipeline.launch(plan)
            outputs = self._output_processor.take_held()
            for _ in range(self._pipeline.num_due(self.config.user.depth, is_stalled=plan is None)):
                outputs += self._take_answer()
            if self.config.user.debug:
                self._scheduler.check([launched.plan for launched in self._pipeline.in_flight])
        return outputs

    def _take_answer(self) -> list[StepOutput]:
        """Wait for the oldest launch in flight; what it made known."""
        plan, result = self._pipeline.take_answer()
        return [self._output_processor.process(emission) for emission in self._scheduler.commit(plan, result)]

    def drain(self) -> None:
        """Take the answers of all launches in flight. Outputs, if any, come with the next `step`."""
        self._check_open()
        while self._pipeline.in_flight:
            self._output_processor.hold(self._take_answer())

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
        self._check_open()
        given = [self._input_processor.process(prompt, own) for prompt, own in zip(prompts, every, strict=True)]
        requests = [self._input_processor.completions(one) for one in given]
        ids = {self._add(completions) for completions in requests}
        try:
            self._run_until_finished(ids, progress)
        finally:
            for request_id in ids:
                self.abort(request_id)
            self._output_processor.drop_held(ids)
        return [self._output_processor.completion(request) for completions in requests for request in completions]

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
        self._output_processor.hold(others)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StepOutput]:
        """Yield the outputs of one request as they come. Closing the iterator early aborts the request."""
        request_id = self.add_request(prompt, params)
        return self._outputs_of(request_id)

    def _outputs_of(self, request_id: str) -> Iterator[StepOutput]:
        try:
            while request_id in self._output_processor.unfinished:
                outputs = self.step()
                self._output_processor.hold([o for o in outputs if o.request_id != request_id])
                yield from (o for o in outputs if o.request_id == request_id)
        finally:
            if self.abort(request_id):
                self._output_processor.drop_held([request_id])

    # State.

    def stats(self) -> EngineStats:
        """Counters and times since the engine was created."""
        scheduler, graphs = self._scheduler, self._runner.graph_stats()
        return snapshot(
            scheduler.stats,
            self._pipeline.times,
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
        in_flight = [launched.describe() for launched in self._pipeline.in_flight]
        return {**self._scheduler.describe(), "in_flight": in_flight, "last_graph_key": self._runner.last_key}

    def _report(self) -> str:
        return json.dumps(self.dump_state())

    def close(self) -> None:
        """Wait for launches in flight, release the device and give the model back. Closing twice is allowed."""
        if not self._closed:
            self._closed = True
            self._pipeline.close()
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
        self._pipeline.check()
