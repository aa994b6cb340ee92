"""A second model drafts: what it proposes, what it costs, what it may never change."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import COMMON, VOCAB, byte_tokenizer, tiny_model
from same_text import NearTies, Scorer, assert_same_text, processed
from torch import nn

from attention import Bucket
from graphspec import Engine, EngineConfig, SamplingParams
from graphspec.drafting import DrafterBuffers, DraftInputs, Drafts, HistoryDrafter, PromptChunks
from graphspec.records.request import Request
from graphspec.sampling.keyed_sampling import PURPOSE_TARGET, SAMPLERS, gumbel, position_keys
from graphspec.sampling.rows import as_int32
from graphspec.scheduling.slot_table import DECODE

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
# Without presence and frequency penalties, where a text is cut into prompt and output does not matter.
SAMPLED = [
    SamplingParams(max_tokens=24, temperature=1.0, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=0.8, top_k=30, seed=2, ignore_eos=True, repetition_penalty=1.2),
    SamplingParams(max_tokens=24, temperature=1.2, top_p=0.9, seed=3, ignore_eos=True, logit_bias={7: 2.0, 9: -3.0}),
]


def small_llama(**changes: Any) -> nn.Module:
    """Another number of layers and heads than the target's, other weights, and tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    own = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**{**COMMON, **own, "tie_word_embeddings": True, **changes}))
    return model.eval().requires_grad_(False)


def prompts(count: int) -> list[list[int]]:
    """The first two are whole pages and one token: all of it but that token is found in the cache again."""
    rng = random.Random(count)
    lengths = [9, 17, *(rng.randint(1, 20) for _ in range(count - 2))]
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


def engine_of(draft: nn.Module | None, **config: Any) -> Engine:
    common: dict[str, Any] = {"max_num_seqs": 5, "page_size": 8, "max_model_len": 96, "max_prefill_tokens": 24}
    return Engine(tiny_model(), config=EngineConfig(**{**common, "depth": 0, **config}), draft_model=draft)


def drafts_in(
    engine: Engine, params: list[SamplingParams], count: int
) -> Iterator[tuple[Request, list[int], list[int]]]:
    """Run `count` prompts; after every step, for every decoding request, its known tokens and the drafts for the next
    ones. With the synchronous engine the two belong together."""
    for i, prompt in enumerate(prompts(count)):
        engine.add_request(prompt, params[i % len(params)])
    table, drafts = engine._scheduler.table, engine._runner._iteration.state.drafts
    while engine.has_unfinished_requests():
        engine.step()
        for slot, request in enumerate(table.request):
            if request is not None and table.phase[slot] == DECODE:
                yield request, request.token_ids, drafts[slot].tolist()


def continuation(scorer: Scorer, known: list[int], count: int, params: SamplingParams, seed: int) -> list[int]:
    """What the model says after `known`: its likeliest token, or the one its logits and the noise of `seed` give."""
    words = torch.tensor([[as_int32(seed), as_int32(seed >> 32)]], dtype=torch.int32)
    ids, text = torch.arange(VOCAB, dtype=torch.int32), list(known)
    for place in range(len(known), len(known) + count):
        keys = position_keys(words, torch.zeros(1, dtype=torch.int32), torch.tensor([[place]]), PURPOSE_TARGET)[0, 0]
        logits = processed(scorer.logits(text), text, 1, params, scorer.eos_ids)
        text.append(int((logits + params.temperature * gumbel(keys, ids).double()).argmax()))
    return text[len(known) :]


PARITY: list[dict[str, Any]] = [
    {"num_speculative_tokens": 3},
    {"num_speculative_tokens": 1, "max_prefill_tokens": 5},
    {"num_speculative_tokens": 5, "num_pages": 9},  # preemption
    {"num_speculative_tokens": 2, "temperature": 1.0},
]


@pytest.mark.parametrize(
    ("architecture", "variant"), [*(("tied", v) for v in PARITY), ("gemma2", PARITY[0])], ids=lambda v: str(v)
)
def test_drafts_are_what_the_draft_model_says_after_the_accepted_tokens(
    architecture: str, variant: dict[str, Any]
) -> None:
    """Against float64 transformers, after every step: chunked prompts, accepted and rejected drafts, preemption, and
    in the second round prompts from the cache, whose pages must hold the draft model's KV too."""
    config = {key: value for key, value in variant.items() if key != "temperature"}
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 5} if "temperature" in variant else {}
    params = SamplingParams(max_tokens=12, ignore_eos=True, **sampling)
    draft = small_llama() if architecture == "tied" else tiny_model("gemma2")
    scorer, ties = Scorer(draft), NearTies()
    k = config["num_speculative_tokens"]
    with engine_of(draft, **config) as engine:
        for _ in range(2):
            for request, known, drafts in drafts_in(engine, [params], 7):
                useful = min(k, request.limit - len(known))  # what comes later is drafted without pages, and cut
                expected = continuation(scorer, known, useful, params, request.seed)
                assert_same_text(scorer, known, expected, drafts[:useful], ties, params, request.seed)
        stats = engine.stats()
    assert (stats.num_preemptions > 0) == ("num_pages" in variant)
    assert stats.prefix_cache_hit_rate > 0.1
    assert ties.tokens > 150
    ties.check()


@pytest.mark.parametrize("params", [[GREEDY], SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_model_equal_to_the_target_is_always_accepted(params: list[SamplingParams]) -> None:
    """Up to near-ties: the target sees the drafts in one forward of 1 + k tokens, the draft model one by one. From the
    cache too, and with the target's noise at any temperature."""
    ties, scorer = NearTies(), Scorer(tiny_model())
    with engine_of(tiny_model(), num_speculative_tokens=4, page_size=4) as engine:  # k - 1 places may need a page
        for _ in range(2):
            seen = list(drafts_in(engine, params, 8))
            for request, known, drafts in seen:
                text = request.token_ids[len(known) :][:4]
                assert_same_text(scorer, known, text, drafts[: len(text)], ties, request.params, request.seed)
        stats = engine.stats()
    assert stats.prefix_cache_hit_rate > 0.2
    assert stats.num_drafts > 60
    assert stats.num_draft_tokens - stats.num_accepted_tokens <= 4 * len(ties.found)
    ties.check()


def acceptance(params: SamplingParams, **config: Any) -> float:
    with engine_of(tiny_model(), num_speculative_tokens=3, **config) as engine:
        engine.generate(prompts(6), params, progress=False)
        stats = engine.stats()
    return stats.num_accepted_tokens / stats.num_draft_tokens


def test_sharing_the_noise_is_what_makes_sampled_drafts_agree() -> None:
    assert acceptance(SAMPLED[0]) > 0.95
    assert acceptance(SAMPLED[0], draft_shares_noise=False) < 0.5


def test_a_shorter_context_lowers_acceptance_and_nothing_else() -> None:
    """Scenario 36: past its context the positions of the draft model stand still."""
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    accepted, texts = [], []
    for longest in (512, 40):
        short = tiny_model()
        short.config.max_position_embeddings = longest  # type: ignore[union-attr]
        with engine_of(short, num_speculative_tokens=3, depth=2) as engine:
            texts.append([c.token_ids for c in engine.generate(prompts(4), params, progress=False)])
            stats = engine.stats()
            accepted.append(stats.num_accepted_tokens / stats.num_draft_tokens)
    assert texts[0] == texts[1]
    assert accepted[0] > 0.95 > 0.8 > accepted[1] > 0.2


def test_running_into_max_model_len_with_drafts_beyond_it() -> None:
    """Scenario 36: drafts past the end go to the scratch page, not to a page of a neighbour."""
    params, texts = SamplingParams(max_tokens=500, ignore_eos=True), []
    for k in (0, 1, 6):
        with engine_of(tiny_model(), num_speculative_tokens=k, max_model_len=45, depth=2, debug=True) as engine:
            texts.append([c.token_ids for c in engine.generate(prompts(5), params, progress=False)])
    assert texts[0] == texts[1] == texts[2]


def test_its_graphs_equal_eager_and_padding_rows_stay_on_the_scratch_page() -> None:
    """Scenario 37, G 54: every graph is replayed against eager, and with garbage in what padding rows own, the draft
    model's scratch page included, before the engine serves."""
    config: dict[str, Any] = {"num_speculative_tokens": 3, "max_num_seqs": 2, "graph_rows": (2,)}
    with engine_of(small_llama(), **config, self_test=True) as engine:
        assert engine.stats().num_graphs == len(SAMPLERS)
        padding = engine._runner.decode_step.padding()
        assert {name for name in padding if "kv" in name} == {"kv.0", "kv.1", "kv.2", "drafter.kv.0"}
        graphs = engine.generate(prompts(5), SAMPLED[0], progress=False)
        assert engine.stats().off_graph_decode_steps == 0
    with engine_of(small_llama(), **config, enforce_eager=True) as engine:
        eager = engine.generate(prompts(5), SAMPLED[0], progress=False)
    assert [c.token_ids for c in graphs] == [c.token_ids for c in eager]


def test_the_pages_of_both_models_are_paid_for() -> None:
    with engine_of(None, num_speculative_tokens=3, max_num_seqs=4096, kv_memory_fraction=1e-4) as alone:
        pages = alone.config.num_pages
    with engine_of(tiny_model(), num_speculative_tokens=3, max_num_seqs=4096, kv_memory_fraction=1e-4) as engine:
        assert engine.config.num_pages == pytest.approx(pages / 2, rel=0.2)  # free memory is a moving number


def test_what_does_not_fit_together_is_refused_in_one_sentence(tmp_path: Path) -> None:
    def refused(sentence: str, draft: nn.Module | None = None, **config: Any) -> None:
        model = tiny_model()
        with pytest.raises(ValueError, match=sentence):
            Engine(model, config=EngineConfig(**config), draft_model=model if draft is model_itself else draft)
        with Engine(model):  # nothing was touched
            pass

    model_itself, mixtral = nn.Module(), small_llama()
    mixtral.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4}  # type: ignore[union-attr]
    refused("a vocabulary of 50 tokens and the model one of 211", small_llama(vocab_size=50))
    refused("is the model itself", model_itself)
    refused('draft model cannot be used: rope type "dynamic"', mixtral)
    refused("needs a model", drafter="draft_model")
    refused("names another drafter", small_llama(), drafter="ngram")
    refused("names another drafter", small_llama(), draft_model="smollm2-135m")
    refused("no config.json", draft_model=str(tmp_path))
    with pytest.raises(ValueError, match='"ngram" uses no draft_model'):
        EngineConfig(drafter="ngram", draft_model="smollm2-135m")


def checkpoint(folder: Path, base: Path, tokenizer: Any, *, vocab_size: int = 259, scale: float = 1.0) -> str:
    """The model of `base` with its vocabulary padded to `vocab_size`; `scale` says how likely it finds the padding."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(1)
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    model.get_output_embeddings().weight.data[259:].normal_(std=scale * COMMON["initializer_range"])
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


def test_vocabularies_padded_to_different_sizes_work(tmp_path: Path, tiny_checkpoint: Path) -> None:
    """The same model with 0, 5 and 61 ids that no tokenizer gives, and once it finds them likelier than all others.
    Drafts are never an id that the target does not have, and the draft model reads any that the target emits."""
    plain = checkpoint(tmp_path / "plain", tiny_checkpoint, byte_tokenizer())
    some = checkpoint(tmp_path / "some", tiny_checkpoint, byte_tokenizer(), vocab_size=264)
    many = checkpoint(tmp_path / "many", tiny_checkpoint, byte_tokenizer(), vocab_size=320)
    loud = checkpoint(tmp_path / "loud", tiny_checkpoint, byte_tokenizer(), vocab_size=320, scale=8.0)
    sampled = SamplingParams(max_tokens=40, temperature=1.0, top_k=30, seed=3, ignore_eos=True, repetition_penalty=1.1)
    greedy = SamplingParams(max_tokens=40, ignore_eos=True)

    def run(target: str, **config: Any) -> tuple[list[list[int]], float]:
        with Engine.from_pretrained(target, EngineConfig(max_model_len=96, **config)) as engine:
            every = [[*p, engine._input_processor._facts.vocab_size - 1] for p in prompts(4)]
            done = engine.generate(every, [greedy, sampled, greedy, sampled], progress=False)
            return [c.token_ids for c in done], engine.stats().draft_acceptance_rate

    for target, draft, lowest in [(plain, loud, 0.95), (many, plain, 0.02), (many, some, 0.02)]:
        expected, _ = run(target, num_speculative_tokens=0)
        found, rate = run(target, num_speculative_tokens=3, draft_model=draft)
        assert found == expected
        assert rate > lowest, (target, draft)
        padding = {token for text in found for token in text if token >= 259}
        assert bool(padding) == (target != plain)


def test_tokenizers_that_differ_are_refused_by_the_first_id_that_does(tmp_path: Path, tiny_checkpoint: Path) -> None:
    """The sizes are equal, or would be allowed to differ."""
    swapped, longer = copy.deepcopy(byte_tokenizer()), copy.deepcopy(byte_tokenizer())
    longer.add_tokens(["<extra>"])
    described = json.loads(swapped.backend_tokenizer.to_str())
    vocab = described["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.__getitem__)[100:102]
    vocab[first], vocab[second] = 101, 100
    swapped._tokenizer = type(swapped.backend_tokenizer).from_str(json.dumps(described))
    cases = [
        (swapped, 259, f'token id 100 is "{second}" for the draft model and "{first}" for the model'),
        (longer, 264, 'token id 259 is "<extra>" for the draft model and no token for the model'),
        (byte_tokenizer(), 200, "a vocabulary of 200 tokens and the model one of 259, and their tokenizer 259"),
        (None, 259, "has no tokenizer that can be read"),
    ]
    for i, (tokenizer, vocab_size, sentence) in enumerate(cases):
        draft = checkpoint(tmp_path / str(i), tiny_checkpoint, tokenizer, vocab_size=vocab_size)
        with pytest.raises(ValueError, match=re.escape(sentence)):
            Engine.from_pretrained(str(tiny_checkpoint), EngineConfig(draft_model=draft))


def test_without_speculation_no_draft_model_is_loaded_and_both_models_are_given_back() -> None:
    draft = small_llama()
    with engine_of(draft, num_speculative_tokens=0) as engine:
        assert engine._runner.drafter.name == "none"
        assert not any(name.endswith("paged_kv") for name, _ in draft.named_buffers())
    with engine_of(draft, num_speculative_tokens=1) as engine:
        assert engine._runner.drafter.name == "draft_model"
        assert any(name.endswith("paged_kv") for name, _ in draft.named_buffers())
    assert not any(name.endswith("paged_kv") for name, _ in draft.named_buffers())


class LinearHead(HistoryDrafter):
    """The smallest learned head: one linear map over the target's last hidden states. With the target's own output
    weights it says again what the target has just said, so every draft must be the newest token. It also checks that
    prompts and emitted tokens reach it exactly once and in order, in a state by slot and one by page."""

    name = "linear"
    hidden_layers = (0, -1)
    reads_prompt = True

    def __init__(self, head: torch.Tensor, num_slots: int, num_pages: int, page_size: int) -> None:
        self._head, self._page_size = head, page_size
        self.read = torch.zeros(num_slots + 1, dtype=torch.int64)  # position of the newest token seen, by slot
        self.entered = torch.zeros(num_pages + 1, page_size, head.shape[1])  # embedding at every place, by page

    def plan(self, buckets: Any, table_width: int) -> None:
        assert all(isinstance(bucket, Bucket) for bucket in buckets)

    def buffers(self) -> DrafterBuffers:
        return DrafterBuffers(by_slot={"read": self.read}, by_page={"entered": self.entered})

    def prefill(self, chunks: PromptChunks) -> None:
        self.entered.flatten(0, 1).index_copy_(0, chunks.paged.slot_mapping, chunks.hidden[0])
        self.read.index_copy_(0, chunks.slots, chunks.positions)

    def propose(self, inputs: DraftInputs, num_draft: int) -> Drafts:
        last = (inputs.num_emitted - 1).view(-1, 1, 1).expand(-1, 1, self._head.shape[1])
        self.read.index_add_(0, inputs.slots, inputs.num_emitted)
        said = (inputs.hidden[1].gather(1, last) @ self._head.T).argmax(-1)
        return Drafts(said.expand(-1, num_draft), torch.full_like(inputs.newest, num_draft))


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_learned_head_gets_hidden_states_prompts_and_state(
    enforce_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shape of an EAGLE-like drafter, through the real engine: captured steps, chunks, cached prefixes."""
    head, drafters = tiny_model().get_output_embeddings().weight, []  # type: ignore[operator]
    embedding = tiny_model().get_input_embeddings().weight  # type: ignore[operator]

    def create(config: Any, *_: Any) -> LinearHead:
        user = config.user
        drafters.append(LinearHead(head, user.max_num_seqs, config.num_pages, user.page_size))
        return drafters[-1]

    monkeypatch.setattr("graphspec.execution.runner.create_drafter", create)
    with engine_of(None, num_speculative_tokens=2, max_prefill_tokens=6, enforce_eager=enforce_eager) as engine:
        table = engine._scheduler.table
        for _ in range(2):
            for request, known, drafts in drafts_in(engine, [GREEDY], 6):
                slot, pages = request.slot, table.pages(request.slot or 0)
                assert drafts == known[-1:] * 2
                assert slot is not None
                assert int(drafters[0].read[slot]) == len(known) - 1
                places = [(pages[p // 8], p % 8) for p in range(len(request.prompt_ids))]
                entered = torch.stack([drafters[0].entered[place] for place in places])
                assert torch.equal(entered, embedding[torch.tensor(request.prompt_ids)])
        assert engine.stats().prefix_cache_hit_rate > 0.2
        assert engine.stats().num_accepted_tokens > 0  # the tiny model repeats itself now and then
