"""vLLM as a peer of `compare_peers.py`, by its public `LLM` class, in a Python that has it: n-gram drafts of the
lengths that graphspec matches, no prefix cache, since the same prompts come every round."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import vllm

if TYPE_CHECKING:
    from graphspec.commands.bench.peer import Answer, Request, Run


def start(first: Request) -> tuple[Run, str]:
    drafts: dict[str, Any] = {}
    if first["num_draft"]:
        ngram = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
        drafts["speculative_config"] = {"method": "ngram", "num_speculative_tokens": first["num_draft"], **ngram}
    engine = vllm.LLM(
        model=first["model"],
        dtype=first["dtype"],
        max_model_len=first["max_model_len"],
        max_num_seqs=first["concurrency"],
        kv_cache_memory_bytes=first["kv_bytes"],  # else it takes most of the machine's memory, or refuses
        enable_prefix_caching=False,
        disable_log_stats=False,  # the times of requests and the counts of drafts
        **drafts,
    )

    def run(request: Request) -> Answer:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=request["max_tokens"])
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        before, started = draft_counts(engine), time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        drafted, accepted = (now - then for now, then in zip(draft_counts(engine), before, strict=True))
        acceptance = None if drafts and not drafted else 1 + accepted / max(1, drafted)
        return {"seconds": seconds, "mean_acceptance_length": acceptance, **times(outputs)}

    return run, f"vllm {vllm.__version__}"


def draft_counts(engine: Any) -> tuple[int, int]:
    """Steps of a request that verified drafts, and drafts accepted, since the engine started."""
    counts = {metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")}
    names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
    return int(counts.get(names[0], 0)), int(counts.get(names[1], 0))


def times(outputs: Any) -> Answer:
    """Tokens, and the times of each request from when it left the queue; none where this vLLM does not keep them."""
    found: Answer = {"token_ids": [], "ttft": [], "tpot": []}
    for output in outputs:
        ids, kept = list(output.outputs[0].token_ids), output.metrics
        found["token_ids"].append(ids)
        if kept is not None:
            found["ttft"].append(kept.first_token_ts - kept.scheduled_ts)
            if len(ids) > 1:
                found["tpot"].append((kept.last_token_ts - kept.first_token_ts) / (len(ids) - 1))
    return found
