"""transformers' `generate` as a peer of `compare_peers.py`: batches of equal size, padded on the left, greedy; with
drafts by `prompt_lookup_num_tokens`, one request at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

if TYPE_CHECKING:
    from graphspec.commands.bench.peer import Answer, Request, Run


class Clock(StoppingCriteria):  # type: ignore[misc]
    """Asked after every step whether to stop: it notes the time, and never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def start(first: Request) -> tuple[Run, str]:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, first["dtype"])
    model = AutoModelForCausalLM.from_pretrained(first["model"], dtype=dtype).eval().to(device)
    drafts = {"prompt_lookup_num_tokens": first["num_draft"]} if first["num_draft"] else {}

    def run(request: Request) -> Answer:
        found: Answer = {"token_ids": [], "ttft": [], "tpot": []}
        steps, started = 0, time.perf_counter()
        with torch.no_grad():
            for batch in batches(request["prompts"], first["concurrency"]):
                steps += generate(model, batch, request["max_tokens"], drafts, found)
        found["seconds"] = time.perf_counter() - started
        emitted = sum(map(len, found["token_ids"]))
        found["mean_acceptance_length"] = emitted / steps if drafts else 1.0
        return found

    return run, f"transformers {transformers.__version__}, torch {torch.__version__}"


def batches(prompts: list[list[int]], size: int) -> Iterator[list[list[int]]]:
    return (prompts[i : i + size] for i in range(0, len(prompts), size))


def generate(model: Any, prompts: list[list[int]], max_tokens: int, drafts: dict[str, Any], found: Answer) -> int:
    """Answer one batch; returns its steps."""
    eos = model.generation_config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [eos])
    width = max(map(len, prompts))
    padding = min(ends - {None}, default=0)
    ids = torch.tensor([[padding] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    clock, started = Clock(), time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=padding,
        stopping_criteria=StoppingCriteriaList([clock]),
        **drafts,
    )
    for row in out[:, width:].tolist():
        count = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        found["token_ids"].append(row[:count])
        found["ttft"].append(clock.times[0] - started)
        last = clock.times[-1] if drafts else clock.times[count - 1]
        if count > 1:
            found["tpot"].append((last - clock.times[0]) / (count - 1))
    return len(clock.times)
