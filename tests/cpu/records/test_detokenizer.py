"""Incremental text equals the full decode, and no piece ends inside a character."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from conftest import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from graphspec.records.detokenizer import REPLACEMENT, IncrementalDetokenizer

EXACT = settings(max_examples=200, deadline=None, derandomize=True)


@functools.cache
def merged_tokenizer() -> Any:
    """A byte-level BPE with some merges, which end inside characters as often as at their ends."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    corpus = [
        "the cat sat on the mat. ",
        "日本語の文字と漢字",
        "né à Zürich, été",
        "😀😃👩‍👩‍👧‍👦🇩🇪",
        "Привет мир",
        "a, b , c .",
    ]
    inner.train_from_iterator(corpus * 5, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


TOKENIZERS = st.sampled_from([byte_tokenizer, merged_tokenizer])
WORDS = st.sampled_from(
    ["the cat ", "日本", "語の", "été", "👩‍👩‍👧‍👦", "😀", "🇩🇪", " .", "  ", "\n", "мир", REPLACEMENT, "e\u0301"]
)
TEXTS = st.one_of(st.text(max_size=20), st.lists(WORDS, max_size=8).map("".join))
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=20)


def push(detokenizer: IncrementalDetokenizer, ids: list[int], *, final: bool) -> str:
    detokenizer.update(ids)
    return detokenizer.take_text(final=final)


def pieces_of(detokenizer: IncrementalDetokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """What the detokenizer gives for `ids`, fed in chunks of `sizes` (repeated), and the final flush last."""
    pieces, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        pieces.append(push(detokenizer, ids[at : at + size], final=False))
        at, turn = at + size, turn + 1
    return [*pieces, push(detokenizer, [], final=True)]


@EXACT
@given(TOKENIZERS, TEXTS, SIZES)
def test_pieces_join_to_the_text_and_hold_whole_characters(tokenizer: Any, text: str, sizes: list[int]) -> None:
    ids = tokenizer().encode(text, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer())
    pieces = pieces_of(detokenizer, ids, sizes)
    assert "".join(pieces) == text == detokenizer.text
    assert sum(piece.count(REPLACEMENT) for piece in pieces) == text.count(REPLACEMENT)
    if REPLACEMENT not in text:
        assert pieces[-1] == "", "text that was certain waited for the end"


@EXACT
@given(TOKENIZERS, st.lists(st.integers(0, 258), max_size=30), SIZES)
def test_any_ids_join_to_their_full_decode(tokenizer: Any, ids: list[int], sizes: list[int]) -> None:
    """Random bytes with special tokens between them: invalid text too comes out as the full decode has it."""
    pieces = pieces_of(IncrementalDetokenizer(tokenizer()), ids, sizes)
    assert "".join(pieces) == tokenizer().decode(ids, skip_special_tokens=True)
    assert not any(piece.endswith(REPLACEMENT) for piece in pieces[:-1]), "these bytes might have become a character"


@functools.cache
def word_tokenizer() -> Any:
    """Like SentencePiece: a token that starts a word brings a space, unless it is the first of what is decoded."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokens = ["<s>", "</s>", "\u2581the", "\u2581cat", "s", "\u2581", ".", "\u2581a"]
    inner = Tokenizer(models.WordLevel(vocab={token: i for i, token in enumerate(tokens)}, unk_token="."))
    inner.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


@EXACT
@given(st.lists(st.integers(0, 7), max_size=20), SIZES)
def test_spaces_between_words_survive_the_cut_into_pieces(ids: list[int], sizes: list[int]) -> None:
    pieces = pieces_of(IncrementalDetokenizer(word_tokenizer()), ids, sizes)
    assert "".join(pieces) == word_tokenizer().decode(ids, skip_special_tokens=True)


@EXACT
@given(st.text(max_size=8), st.sampled_from("é語😀"), st.integers(1, 3), SIZES)
def test_truncated_bytes_come_with_the_final_flush_only(text: str, last: str, cut: int, sizes: list[int]) -> None:
    tokenizer, missing = byte_tokenizer(), min(cut, len(last.encode()) - 1)
    ids = tokenizer.encode(text + last, add_special_tokens=False)[:-missing]
    pieces = pieces_of(IncrementalDetokenizer(tokenizer), ids, sizes)
    assert text.startswith("".join(pieces[:-1]))
    assert "".join(pieces) == tokenizer.decode(ids)
    assert pieces[-1].endswith(REPLACEMENT)


@EXACT
@given(TOKENIZERS, TEXTS, st.lists(st.integers(0, 60), max_size=4), SIZES)
def test_special_tokens_are_skipped_even_inside_a_character(
    tokenizer: Any, text: str, places: list[int], sizes: list[int]
) -> None:
    ids = tokenizer().encode(text, add_special_tokens=False)
    for place in places:
        ids.insert(place, tokenizer().eos_token_id)
    assert "".join(pieces_of(IncrementalDetokenizer(tokenizer()), ids, sizes)) == text


@st.composite
def texts_and_stops(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A text, and stop strings that are cut out of it or nearly occur in it; overlaps and common starts are likely."""
    text = draw(st.lists(st.sampled_from(["a", "a", "b", "é", "日本", "the cat ", "😀"]), max_size=12).map("".join))
    spans = st.tuples(st.integers(0, 12), st.integers(1, 6)).map(lambda span: text[span[0] : sum(span)])
    near = st.text("abé", min_size=1, max_size=4)
    return text, draw(st.lists(st.one_of(near, spans.filter(bool) if text else near), min_size=1, max_size=4))


def stop_oracle(texts: list[str], stops: list[str], skip: int, include: bool) -> tuple[int, str] | None:
    """The first token after `skip` that completes a stop string, and the text cut at it; `texts[n]` is that of the
    first n tokens. Of several, the one that starts first counts, then the shorter."""
    for n in range(skip + 1, len(texts)):
        ends = [(at, at + len(s)) for s in stops for at in range(len(texts[n])) if texts[n].startswith(s, at)]
        if ends := [(at, end) for at, end in ends if end > len(texts[n - 1])]:
            return n, texts[n][: min(ends)[include]]
    return None


@settings(EXACT, max_examples=600)
@given(TOKENIZERS, texts_and_stops(), SIZES, st.sampled_from([0, 0, 1, 3, 8]), st.booleans())
def test_text_ends_at_the_first_stop_string_and_shows_none_of_it(
    tokenizer: Any, case: tuple[str, list[str]], sizes: list[int], skip: int, include: bool
) -> None:
    """As if all had been decoded at once, whatever the chunks; what is shown is never taken back, and only what may
    be the start of a stop string is held back."""
    text, stops = case
    ids = tokenizer().encode(text, add_special_tokens=False)
    texts = [tokenizer().decode(ids[:n]).rstrip(REPLACEMENT) for n in range(len(ids) + 1)]
    found = stop_oracle(texts, stops, skip, include)
    count, expected = found or (len(ids), text)
    detokenizer, counted, shown = IncrementalDetokenizer(tokenizer(), stops, include), 0, ""
    for size in sizes * len(ids):
        if detokenizer.stopped or counted == len(ids):
            break
        counted += detokenizer.update(ids[counted : counted + size], max(0, skip - counted))
        shown += detokenizer.take_text(final=False)
        assert expected.startswith(shown)
        if not detokenizer.stopped and not skip:
            held = [n for s in stops for n in range(len(s)) if texts[counted].endswith(s[:n])]
            assert shown == texts[counted][: len(texts[counted]) - max(held)]
    assert shown + detokenizer.take_text(final=True) == detokenizer.text == expected
    assert (counted, detokenizer.stopped) == (count, found is not None)
    assert detokenizer.take_text(final=True) == ""


class RawBytes:
    """A tokenizer whose tokens are any bytes: id i is `tokens[i]`."""

    def __init__(self, *tokens: bytes) -> None:
        self._tokens = tokens

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return b"".join(self._tokens[i] for i in token_ids).decode(errors="replace")


def test_a_stop_string_before_a_truncated_character_ends_the_text() -> None:
    detokenizer = IncrementalDetokenizer(RawBytes(b"one", b".\xe2"), stop=["."])
    assert push(detokenizer, [0, 1], final=True) == "one"
    assert detokenizer.stopped


def test_held_back_text_is_shown_as_soon_as_the_stop_string_cannot_come() -> None:
    """Across tokens and inside a character; the end shows what still waits."""
    detokenizer = IncrementalDetokenizer(RawBytes(b"a", b"b\xc3", b"\xa9", b"!"), stop=["ab\u00e9!", "?"])
    assert [push(detokenizer, [i], final=False) for i in (0, 1, 2, 0, 1, 2)] == ["", "", "", "ab\u00e9", "", ""]
    assert push(detokenizer, [], final=True) == "ab\u00e9"
    detokenizer = IncrementalDetokenizer(RawBytes(b"a", b"b\xc3", b"\xa9", b"!"), stop=["ab\u00e9!", "?"])
    assert [push(detokenizer, [i], final=False) for i in (3, 0, 1, 2, 3)] == ["!", "", "", "", ""]
    assert (detokenizer.stopped, push(detokenizer, [], final=True)) == (True, "")


@pytest.mark.parametrize(
    ("skip", "count", "text"), [(0, 2, ""), (1, 2, ""), (2, 4, "ab"), (3, 4, "ab"), (4, 4, "abab")]
)
def test_a_stop_string_counts_if_it_is_completed_after_the_skipped_tokens(skip: int, count: int, text: str) -> None:
    """It may start among them."""
    detokenizer = IncrementalDetokenizer(RawBytes(b"a", b"b"), stop=["ab"])
    assert (detokenizer.update([0, 1, 0, 1], skip), detokenizer.text, detokenizer.stopped) == (count, text, skip < 4)


def test_of_stop_strings_that_one_token_completes_the_first_start_counts_then_the_shorter() -> None:
    """The order in which they are given does not matter."""
    for stops in (["bc", "abcd", "ab"], ["abcd", "ab", "bc"]):
        detokenizer = IncrementalDetokenizer(RawBytes(b"xabcd"), stops, include_stop=True)
        assert (push(detokenizer, [0], final=False), detokenizer.stopped) == ("xab", True)
