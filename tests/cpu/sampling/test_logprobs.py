"""Log-probabilities of output and prompt against a direct forward, and what a user gets of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from conftest import VOCAB, tiny_model
from torch import nn

from graphspec import Completion, Engine, EngineConfig, Logprob, SamplingParams, StepOutput
from graphspec.sampling.logprobs import logprob_width, read_logprobs, token_logprobs

EXACT = 1e-4
PARAMS = [
    SamplingParams(max_tokens=24, logprobs=5, prompt_logprobs=3, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=1.2, seed=1, logprobs=0, prompt_logprobs=20, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=0.9, top_p=0.8, seed=2, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=0.9, top_k=8, seed=3, logprobs=20, repetition_penalty=1.4),
    SamplingParams(max_tokens=24, temperature=1.0, seed=4, prompt_logprobs=0, n=2),
]  # fmt: skip


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 14))] * 2 for _ in range(count)]


def assert_position(entry: dict[int, Logprob], token: int, expected: torch.Tensor, num_top: int) -> None:
    """`entry` describes `token` and the `num_top` most likely ones under log-probabilities `expected` `[V]`."""
    best = expected.topk(num_top)
    assert len(entry) == num_top + (token not in [t for t, e in entry.items() if e.rank <= num_top])
    assert next(iter(entry)) == token
    for found, own in entry.items():
        assert abs(own.logprob - float(expected[found])) < EXACT
        higher = int((expected > expected[found] + EXACT).sum())
        assert higher < own.rank <= higher + 1 + int(((expected - expected[found]).abs() <= EXACT).sum())
    top = sorted((e.logprob for e in entry.values() if e.rank <= num_top), reverse=True)
    assert torch.allclose(torch.tensor(top, dtype=torch.float64), best.values, atol=EXACT, rtol=0)


def assert_completion(scorer: nn.Module, prompt: list[int], params: SamplingParams, done: Completion) -> None:
    ids = torch.tensor([prompt + done.token_ids])
    with torch.no_grad():
        logprobs = scorer(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    assert (done.logprobs is None) == (params.logprobs is None)
    for i, entry in enumerate(done.logprobs or []):
        assert_position(entry, done.token_ids[i], logprobs[len(prompt) - 1 + i], params.logprobs or 0)
    assert len(done.logprobs or done.token_ids) == len(done.token_ids)
    if params.prompt_logprobs is None or done.index > 0:
        assert done.prompt_logprobs is None
        return
    assert done.prompt_logprobs is not None
    assert len(done.prompt_logprobs) == len(prompt)
    for i, prompt_entry in enumerate(done.prompt_logprobs):
        if i == 0:
            assert prompt_entry is None
        else:
            assert prompt_entry is not None
            assert_position(prompt_entry, prompt[i], logprobs[i - 1], params.prompt_logprobs)


@pytest.mark.parametrize(
    "config",
    [
        {"num_speculative_tokens": 0, "depth": 0},
        {"num_speculative_tokens": 3, "depth": 1, "max_prefill_tokens": 7},
        {"num_speculative_tokens": 4, "depth": 2, "num_pages": 14, "max_prefill_tokens": 6},  # preemption
        {"num_speculative_tokens": 2, "depth": 1, "enforce_eager": True},
    ],
    ids=lambda c: "-".join(map(str, c.values())),
)
def test_they_are_those_of_a_direct_forward(config: dict[str, Any], tiny_llama: nn.Module) -> None:
    """Before temperature and processors; beside requests that ask for none; a second round finds the prompts cached."""
    scorer = tiny_model().double()
    every, params = prompts(7), [PARAMS[i % len(PARAMS)] for i in range(7)]
    config = {"max_model_len": 96, "page_size": 4, "max_num_seqs": 5, **config}
    with Engine(tiny_model(), config=EngineConfig(**config)) as engine:
        for _ in range(2):
            done = engine.generate(every, params, progress=False)
            expanded = [(p, own) for p, own in zip(every, params, strict=True) for _ in range(own.n)]
            for (prompt, own), completion in zip(expanded, done, strict=True):
                assert_completion(scorer, prompt, own, completion)
        stats = engine.stats()
    assert (stats.num_preemptions > 0) == ("num_pages" in config)
    assert (stats.off_graph_decode_steps > 0) == ("enforce_eager" in config)


def test_what_is_streamed_is_what_the_completion_holds() -> None:
    with Engine(tiny_model(), config=EngineConfig(max_model_len=96, page_size=4)) as engine:
        prompt, params = prompts(1)[0] * 3, PARAMS[0]
        outputs: list[StepOutput] = list(engine.stream(prompt, params))
        done = engine.generate([prompt], params, progress=False)[0]
        assert [entry for o in outputs for entry in o.logprobs or []] == done.logprobs
        assert [o.prompt_logprobs is not None for o in outputs] == [True] + [False] * (len(outputs) - 1)
        assert outputs[0].prompt_logprobs == done.prompt_logprobs
        assert engine.stats().prefix_cache_hit_rate == 0.0  # the whole prompt was computed again
        engine.generate([prompt], SamplingParams(max_tokens=1), progress=False)
        assert engine.stats().prefix_cache_hit_rate > 0.2  # what it computed is shared all the same
        plain = list(engine.stream(prompt, SamplingParams(max_tokens=4)))
    assert all(o.logprobs is None and o.prompt_logprobs is None for o in plain)


def test_a_vocabulary_smaller_than_the_most_alternatives() -> None:
    torch.manual_seed(0)
    logits, tokens = torch.randn(2, 3, 7).bfloat16(), torch.randint(0, 7, (2, 3))
    packed = token_logprobs(logits, tokens)
    assert packed.shape == (2, 3, logprob_width(7))
    rows, expected = read_logprobs(packed.numpy()), logits.double().log_softmax(-1)
    for r in range(2):
        for entry, token, own in zip(
            rows.take(r).entries(tokens[r].tolist(), 20), tokens[r].tolist(), expected[r], strict=True
        ):
            assert_position(entry, token, own, 7)


@pytest.mark.parametrize("wrong", [{"logprobs": 21}, {"logprobs": -1}, {"prompt_logprobs": 21}])
def test_more_alternatives_than_there_are_is_one_sentence(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"logprobs must be in 0 \.\. 20"):
        SamplingParams(**wrong)  # type: ignore[arg-type]
