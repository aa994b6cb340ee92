"""From settled tokens to what users get: text, outputs of steps, completions."""

from __future__ import annotations

from collections.abc import Collection

from graphspec.records.outputs import Completion, StepOutput, TokenLogprobs, Usage
from graphspec.records.request import Request
from graphspec.scheduling.result_processor import Emission


class OutputProcessor:
    """Knows the completions that have not ended, and the outputs that no `Engine.step` has returned yet.

    `synthetic`: the tokens are those of forced acceptance.
    """

    def __init__(self, *, synthetic: bool) -> None:
        self.unfinished: dict[str, list[Request]] = {}  # by request id
        self._synthetic = synthetic
        self._held: list[StepOutput] = []

    def open(self, completions: list[Request]) -> None:
        """Expect outputs of the completions of a new request."""
        self.unfinished[completions[0].request_id] = list(completions)

    def process(self, emission: Emission) -> StepOutput:
        """The output that tells a user of `emission`."""
        request, reason = emission.request, emission.finish_reason
        text = ""
        if request.detokenizer is not None:
            if not request.params.stop:  # the scheduler reads the text only to find stop strings
                request.detokenizer.update(emission.token_ids)
            text = request.detokenizer.take_text(final=reason is not None)
        unfinished = self.unfinished[request.request_id]
        if reason is not None:
            unfinished.remove(request)
            if not unfinished:
                del self.unfinished[request.request_id]
        is_first = len(request.output_ids) == len(emission.token_ids) > 0
        return StepOutput(
            request_id=request.request_id,
            index=request.index,
            new_token_ids=emission.token_ids,
            new_text=text,
            finish_reason=reason,
            finished=not unfinished,
            logprobs=emission.logprobs,
            prompt_logprobs=_prompt_logprobs(request) if is_first else None,
        )

    # Outputs that wait for the next step.

    def hold(self, outputs: Collection[StepOutput]) -> None:
        self._held += outputs

    def take_held(self) -> list[StepOutput]:
        held, self._held = self._held, []
        return held

    def drop_held(self, request_ids: Collection[str]) -> None:
        """Nobody will read the outputs of these requests."""
        self._held = [output for output in self._held if output.request_id not in request_ids]

    def has_held(self) -> bool:
        return bool(self._held)

    # Ended.

    def completion(self, request: Request) -> Completion:
        """What `Engine.generate` returns for a request that has ended."""
        assert request.finish_reason is not None
        return Completion(
            request_id=request.request_id,
            token_ids=request.output_ids,
            text="" if request.detokenizer is None else request.detokenizer.text,
            finish_reason=request.finish_reason,
            usage=Usage(len(request.prompt_ids), len(request.output_ids)),
            seed=request.seed,
            num_decode_steps=request.num_decode_steps,
            num_off_graph_steps=request.num_off_graph_steps,
            synthetic=self._synthetic,
            index=request.index,
            logprobs=None if request.params.logprobs is None else request.logprobs,
            prompt_logprobs=_prompt_logprobs(request),
            acceptance=None if request.acceptance is None else request.acceptance.report(),
        )


def _prompt_logprobs(request: Request) -> list[TokenLogprobs | None] | None:
    """Those of a request that wants them, once all are known."""
    wanted = request.params.prompt_logprobs is not None and not request.wants_prompt_logprobs
    return request.prompt_logprobs if wanted else None
