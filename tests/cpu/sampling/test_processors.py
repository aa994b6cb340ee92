"""Logits processors against transformers' and against exact distributions; what is forbidden never appears."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB, byte_tokenizer, tiny_model
from distributions import FILTERS, assert_chi_square, expected_probabilities, rows_of
from transformers.generation import logits_process as hf

from graphs import GraphKey, RecordedProgram
from graphspec import Engine, EngineConfig, SamplingParams
from graphspec.execution.slot_state import admit, allocate_state
from graphspec.records.launch import Admission
from graphspec.records.sampling_params import kind_parts, sampler_kind
from graphspec.records.token_rules import MAX_PHRASE_TOKENS, MAX_PHRASES, spellings, token_rules
from graphspec.sampling.keyed_sampling import sample
from graphspec.sampling.processors import Context, process
from graphspec.sampling.rows import ProcessorRows
from graphspec.sampling.verification import verify

EOS = 2


def rules_of(params: SamplingParams, num_prompt: int) -> Any:
    return token_rules(
        allowed=params.allowed_token_ids,
        bias=params.logit_bias,
        bad_words=map(tuple, params.bad_words_ids),
        held_ids={EOS, *params.stop_token_ids} if params.min_tokens else (),
        until=num_prompt + params.min_tokens,
    )


def processor_rows(params: list[SamplingParams], num_prompt: list[int], vocab: int) -> ProcessorRows:
    """One row per entry, written the way admissions write slots; each slot belonged to another request before."""
    state = allocate_state(len(params), 0, 64, vocab, torch.device("cpu"))
    before = SamplingParams(bad_words_ids=[[0, 1], [1]], allowed_token_ids=[1], repetition_penalty=3.0)
    for slot, (own, length) in enumerate(zip(params, num_prompt, strict=True)):
        for p in (before, own):
            tokens = torch.zeros(length, dtype=torch.int32).numpy()
            admit(state, Admission(slot, tokens, length, p, rules_of(p, length), seed=0, index=0, salt=0))
    return state.processors.rows(torch.arange(len(params)))


def expected_logits(known: torch.Tensor, num_prompt: int, logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What transformers makes of `logits` `[B, V]` after `known` `[B, L]`; presence and frequency, which it lacks,
    counted by hand."""
    if params.allowed_token_ids is not None:
        forbidden = set(range(logits.shape[1])) - set(params.allowed_token_ids)
        logits = logits.index_fill(1, torch.tensor(sorted(forbidden), dtype=torch.int64), float("-inf"))
    processors: list[Any] = []
    if params.logit_bias:
        processors.append(hf.SequenceBiasLogitsProcessor([[[t], float(b)] for t, b in params.logit_bias.items()]))
    if params.bad_words_ids:
        processors.append(hf.NoBadWordsLogitsProcessor([list(word) for word in params.bad_words_ids], eos_token_id=-1))
    if params.min_tokens:
        held = [EOS, *params.stop_token_ids]
        processors.append(hf.MinNewTokensLengthLogitsProcessor(num_prompt, params.min_tokens, held))
    if params.repetition_penalty != 1.0:
        processors.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    for processor in processors:
        logits = processor(known, logits)
    said = torch.zeros(logits.shape).scatter_add_(1, known[:, num_prompt:], torch.ones(known[:, num_prompt:].shape))
    return logits - params.frequency_penalty * said - params.presence_penalty * (said > 0)


def random_rules(rng: random.Random, vocab: int) -> SamplingParams:
    """Any mixture of processors; each is on in about half of the cases."""

    def ids(count: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(count)]

    def maybe(value: Any, off: Any) -> Any:
        return value if rng.random() < 0.5 else off

    words = [ids(rng.choice((1, 2, 2, 3, 5))) for _ in range(rng.randint(1, 12))]
    return SamplingParams(
        repetition_penalty=maybe(rng.uniform(0.5, 2.0), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        logit_bias=maybe({t: rng.uniform(-9, 9) for t in ids(4)}, None),
        allowed_token_ids=maybe(ids(2 * vocab), None),
        bad_words_ids=maybe(words, ()),
        min_tokens=maybe(rng.randint(1, 12), 0),
        stop_token_ids=ids(rng.randint(0, 2)),
    )


@pytest.mark.parametrize("vocab", [4, 7, 300])
def test_every_position_gets_the_logits_that_transformers_gives_it(vocab: int) -> None:
    """Rows of different requests and lengths; the history behind them is stale; drafts are context for what follows."""
    rng, k = random.Random(vocab), 3
    for trial in range(25):
        torch.manual_seed(trial)
        params = [random_rules(rng, vocab) for _ in range(6)]
        lengths = [rng.randint(1, 20) for _ in params]
        prompts = [rng.randint(1, length) for length in lengths]
        history, drafts = torch.randint(0, vocab, (6, 64)), torch.randint(0, vocab, (6, k))
        logits = torch.randn(6, 1 + k, vocab) * 4
        context = Context.of(history, torch.tensor(lengths) - 1, drafts)
        found = process(logits, context, processor_rows(params, prompts, vocab))
        for row, q in product(range(6), range(1 + k)):
            known = torch.cat((history[row, : lengths[row]], drafts[row, :q]))
            expected = expected_logits(known[None], prompts[row], logits[row, q][None], params[row])
            torch.testing.assert_close(
                found[row, q], expected[0], rtol=0, atol=1e-6, msg=f"{params[row]}, position {q}"
            )


def test_a_row_without_rules_keeps_the_bits_of_its_logits() -> None:
    torch.manual_seed(0)
    logits, history = torch.randn(3, 2, 50), torch.randint(0, 50, (3, 64))
    context = Context.of(history, torch.tensor([0, 9, 60]), torch.randint(0, 50, (3, 1)))
    assert torch.equal(process(logits, context, processor_rows([SamplingParams()] * 3, [1, 4, 2], 50)), logits)


# Exact distributions of whole texts: a chain over six tokens, five positions, random drafts.

LENGTH, TOKENS, START = 5, 6, 0
RULES = [
    *FILTERS,
    SamplingParams(temperature=1.1, presence_penalty=1.2),
    SamplingParams(temperature=0.9, frequency_penalty=0.8, repetition_penalty=1.4),
    SamplingParams(temperature=1.0, bad_words_ids=[[3], [1, 2], [4, 4], [0, 5, 1], [5, 5, 5]]),
    SamplingParams(temperature=1.0, allowed_token_ids=[1, 2, 4, 5], logit_bias={2: -1.0, 4: 1.5}, min_tokens=3),
    SamplingParams(temperature=1.2, top_k=3, repetition_penalty=1.5, bad_words_ids=[[1, 1]]),
    SamplingParams(temperature=1.2, top_p=0.8, frequency_penalty=-0.7, min_tokens=2),
]


def walk(table: torch.Tensor, params: SamplingParams, texts: int, k: int) -> torch.Tensor:
    """Texts `[texts, LENGTH]` of a model whose logits are `table[previous token]`, speculated with random drafts."""
    known = torch.full((texts, 1 + LENGTH + k), START)
    done = torch.zeros(texts, 1, dtype=torch.int64)
    rows, kind = rows_of([params], torch.arange(texts)), kind_parts(sampler_kind(params.needs))
    slot = processor_rows([params], [1], TOKENS)
    slot = slot._replace(phrases=slot.phrases[:, :6, -3:], until=slot.until[:, :6])  # all that is used
    rules = slot.rows(torch.zeros(texts, dtype=torch.int64))
    while int(done.min()) < LENGTH:
        done = done.clamp(max=LENGTH - 1)  # a finished text repeats its last step
        newest, drafts = known.gather(1, done), torch.randint(0, TOKENS, (texts, k))
        places = done + 1 + torch.arange(1 + k)
        logits = table[torch.cat((newest, drafts), 1)]
        if kind.processors:
            logits = process(logits, Context.of(known, done[:, 0], drafts), rules)
        samples = sample(logits, places, rows, kind.base)
        emitted, num_emitted, _ = verify(drafts, samples, torch.full((texts,), k))
        known.scatter_(1, places, emitted)
        done = done + num_emitted.unsqueeze(1)
    return known[:, 1 : 1 + LENGTH]


def text_probabilities(table: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The probability of every text, `[TOKENS] * LENGTH`."""
    probabilities = torch.ones(1, dtype=torch.float64)
    texts = torch.full((1, 1), START)
    for _ in range(LENGTH):
        logits = expected_logits(texts, 1, table[texts[:, -1]], params)
        chance = expected_probabilities(logits, params).double()
        probabilities = (probabilities.unsqueeze(1) * chance).flatten()
        texts = torch.cat((texts.repeat_interleave(TOKENS, 0), torch.arange(TOKENS).repeat(len(texts)).unsqueeze(1)), 1)
    return probabilities.view([TOKENS] * LENGTH)


@pytest.mark.parametrize("params", RULES, ids=range(len(RULES)))
def test_speculation_changes_neither_the_text_nor_its_distribution(params: SamplingParams) -> None:
    """Random drafts, verified by keyed samples: equal seeds give the text of k = 0, and at positions 1 to 5 tokens, and
    pairs of neighbours, follow the exact distribution; what is forbidden never appears, as draft, correction or bonus.
    """
    torch.manual_seed(4)
    table = torch.randn(TOKENS, TOKENS) * 1.5
    plain = walk(table, params, 15_000, k=0)
    assert all(torch.equal(walk(table, params, 15_000, k), plain) for k in (1, 3))
    joint = text_probabilities(table, params)
    for at in range(LENGTH):
        assert_chi_square(plain[:, at], joint.sum([d for d in range(LENGTH) if d != at]))
    for at in range(LENGTH - 1):
        pairs = joint.sum([d for d in range(LENGTH) if d not in (at, at + 1)])
        assert_chi_square(plain[:, at] * TOKENS + plain[:, at + 1], pairs)


# Through the engine.


def texts_of(params: SamplingParams, count: int = 6, **config: Any) -> list[list[int]]:
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(2, 9))] * 2 for _ in range(count)]
    config = {"max_model_len": 96, "page_size": 8, "num_speculative_tokens": 3, **config}
    with Engine(tiny_model(), config=EngineConfig(**config)) as engine:
        done = engine.generate(prompts, replace(params, max_tokens=40), progress=False)
        assert engine.stats().off_graph_decode_steps == 0
    assert {c.finish_reason for c in done} <= {"length", "stop"}
    return [c.token_ids for c in done]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_tokens_and_sequences_never_appear(temperature: float) -> None:
    free = SamplingParams(temperature=temperature, seed=5, ignore_eos=True)
    plain = texts_of(free)
    common = [t for t, _ in Counter(t for text in plain for t in text).most_common(8)]
    pairs = [list(p) for p, _ in Counter(p for text in plain for p in pairwise(text)).most_common(8)]
    words = [*([t] for t in common[:3]), *pairs, *(text[i : i + 3] for text in plain for i in (5, 9))]
    without = texts_of(replace(free, bad_words_ids=words))
    for text in without:
        assert not any(text[i : i + len(word)] == word for word in words for i in range(len(text)))
    allowed = sorted({*common, *range(40, 60)})
    assert {t for text in texts_of(replace(free, allowed_token_ids=allowed)) for t in text} <= set(allowed)
    assert {t for text in texts_of(replace(free, logit_bias={77: 100.0})) for t in text} == {77}
    assert plain != without


def test_stop_ids_cannot_be_sampled_before_min_tokens() -> None:
    """At every verified position: no stop id stands among the first min_tokens tokens, and the next one may be one."""
    plain = texts_of(SamplingParams(temperature=1.0, seed=5, ignore_eos=True))
    stops = [t for t, _ in Counter(t for text in plain for t in text).most_common(60)]
    for least in (1, 4, 21):
        texts = texts_of(SamplingParams(temperature=1.0, seed=5, stop_token_ids=stops, min_tokens=least))
        assert all(len(text) > least for text in texts)
        assert not any({EOS, *stops} & set(text[:-1]) for text in texts)
        assert sum(text[-1] in stops for text in texts) > 3


def test_a_position_at_which_everything_is_forbidden_ends_the_request_with_an_error() -> None:
    params = SamplingParams(max_tokens=20, allowed_token_ids=[7, 8], bad_words_ids=[[8, 8], [7]], min_tokens=1)
    with Engine(tiny_model(), config=EngineConfig(max_model_len=64)) as engine:
        bad, good = engine.generate([[5, 6, 7], [9, 10, 11]], [params, SamplingParams(max_tokens=20)], progress=False)
    assert (bad.token_ids, bad.finish_reason) == ([8], "error")
    assert good.finish_reason in ("length", "stop")


def test_greedy_text_under_processors_is_that_of_generate(tiny_llama: Any) -> None:
    words, prompt = [[101], [56, 112], [9, 9, 9]], [5, 6, 7, 8, 5, 6]
    expected = tiny_llama.generate(
        torch.tensor([prompt]), max_new_tokens=40, min_new_tokens=30, do_sample=False, repetition_penalty=1.3,
        bad_words_ids=words, sequence_bias=[[[44], 1.5]], pad_token_id=0,
    )  # fmt: skip
    params = SamplingParams(
        max_tokens=40, min_tokens=30, repetition_penalty=1.3, bad_words_ids=words, logit_bias={44: 1.5}
    )
    for k in (0, 4):
        with Engine(tiny_model(), config=EngineConfig(num_speculative_tokens=k, max_model_len=64)) as engine:
            found = engine.generate([prompt], params, progress=False)[0].token_ids
        assert found == expected[0, len(prompt) :].tolist()


def test_bad_words_are_forbidden_as_the_tokenizer_writes_them(tiny_checkpoint: Path) -> None:
    tokenizer = byte_tokenizer()
    assert spellings(["ab"], tokenizer) == [tuple(tokenizer.encode(s, add_special_tokens=False)) for s in ("ab", " ab")]
    letters = tokenizer.encode("abcdefgh", add_special_tokens=False)
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=2, allowed_token_ids=letters)
    with Engine.from_pretrained(str(tiny_checkpoint), EngineConfig(max_model_len=64)) as engine:
        text = engine.generate(["fed"], params, progress=False)[0].text
        word = text[8:10]
        without = engine.generate(["fed"], replace(params, bad_words=[word]), progress=False)[0].text
    assert word in text
    assert word not in without


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"bad_words_ids": [[1] * (MAX_PHRASE_TOKENS + 1)]}, "has 17 tokens and the limit is 16: shorten it"),
        ({"bad_words_ids": [[3, i] for i in range(MAX_PHRASES + 1)]}, "129 bad words .* more than the 128 entries"),
        ({"bad_words_ids": [[3, i] for i in range(MAX_PHRASES)], "min_tokens": 1}, "and 1 stop ids under min_tokens"),
        ({"bad_words_ids": [[3, VOCAB]]}, f"token id {VOCAB} in bad words is outside"),
        ({"allowed_token_ids": [-1]}, "token id -1 in allowed_token_ids"),
        ({"logit_bias": {VOCAB: 1.0}}, f"token id {VOCAB} in logit_bias"),
        ({"bad_words": ["x"]}, "need a tokenizer"),
    ],
)
def test_more_than_a_slot_holds_is_one_sentence(params: dict[str, Any], sentence: str) -> None:
    with Engine(tiny_model(), config=EngineConfig(max_model_len=64)) as engine:
        with pytest.raises(ValueError, match=sentence):
            engine.add_request([5], SamplingParams(**params))
        assert not engine.has_unfinished_requests()


def test_cheap_kinds_read_nothing_that_processors_brought() -> None:
    """The record of a greedy step touches neither sampling parameters nor processors, that of a plain one no
    processors; the kinds with extras are the only ones to read them, or to return more than the output row."""
    with Engine(tiny_model(), config=EngineConfig(num_speculative_tokens=2, max_model_len=64)) as engine:
        step = engine._runner.decode_step

        def groups_of(sampler: str) -> tuple[set[str], int]:
            graph = step.capture(GraphKey("decode", 2, 2, 2, sampler))
            assert isinstance(graph.program, RecordedProgram)
            storages = {t.untyped_storage()._cdata for t in graph.program.outside}
            read = {n.split(".")[1] for n, t in step.buffers.items() if t.untyped_storage()._cdata in storages}
            return read & {"sampling", "processors"}, len(graph.contract.outputs)

        found: dict[str, tuple[set[str], int]] = {}
        for sampler in ("greedy", "plain", "bounded", "bounded+processors", "bounded+logprobs"):
            engine._runner.on_stream(lambda s=sampler: found.update({s: groups_of(s)}))  # type: ignore[misc]
    assert found == {
        "greedy": (set(), 1),
        "plain": ({"sampling"}, 1),
        "bounded": ({"sampling"}, 1),
        "bounded+processors": ({"sampling", "processors"}, 1),
        "bounded+logprobs": ({"sampling"}, 2),
    }
