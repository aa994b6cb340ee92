"""Requests that need a given kind of sampler, for whoever looks at the graph of that kind."""

from __future__ import annotations

from typing import Any

from graphspec.records.sampling_params import SamplingParams, kind_parts


def params_for(sampler: str, **common: Any) -> SamplingParams:
    """Parameters of a request that needs exactly this kind of sampler."""
    kind = kind_parts(sampler)
    own: dict[str, Any] = {
        "greedy": {},
        "plain": {"temperature": 0.8},
        "bounded": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
        "sorted": {"temperature": 0.8, "top_p": 0.95},
    }[kind.base]
    if kind.processors:
        own |= {"repetition_penalty": 1.1, "presence_penalty": 0.2, "bad_words_ids": [[17, 18], [19]]}
    if kind.logprobs:
        own |= {"logprobs": 5}
    return SamplingParams(**common, **own)
