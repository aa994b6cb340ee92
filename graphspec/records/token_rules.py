"""Which tokens a request may sample at which position: allowed ids, bias, bad words and min_tokens in one form. No
torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Size of a slot's table of phrases. Bad words of one token are not in it: they are a bias of minus infinity.
MAX_PHRASES, MAX_PHRASE_TOKENS = 128, 16

ALWAYS = 1 << 40  # a position that no text reaches


@dataclass(frozen=True)
class Phrase:
    """The last of `token_ids` is forbidden where the others precede it, at absolute positions below `until`."""

    token_ids: tuple[int, ...]
    until: int = ALWAYS


@dataclass(frozen=True)
class TokenRules:
    """The rules of one request, in the form in which a slot keeps them."""

    allowed: tuple[int, ...] | None = None
    bias: tuple[tuple[int, float], ...] = ()
    forbidden: tuple[int, ...] = ()
    phrases: tuple[Phrase, ...] = ()


NO_RULES = TokenRules()


def token_rules(
    *,
    allowed: Sequence[int] | None,
    bias: Mapping[int, float] | None,
    bad_words: Iterable[tuple[int, ...]],
    held_ids: Iterable[int],
    until: int,
) -> TokenRules:
    """The rules of a request; `held_ids` cannot be sampled at positions below `until`.

    Raises ValueError for more or longer phrases than a slot holds.
    """
    unique = set(bad_words)
    longer = sorted(word for word in unique if len(word) > 1)
    too_long = next((word for word in longer if len(word) > MAX_PHRASE_TOKENS), None)
    if too_long is not None:
        raise ValueError(f"a bad word has {len(too_long)} tokens and the limit is {MAX_PHRASE_TOKENS}: shorten it")
    phrases = [*(Phrase(word) for word in longer), *(Phrase((token,), until) for token in sorted(held_ids))]
    if len(phrases) > MAX_PHRASES:
        raise ValueError(
            f"{len(longer)} bad words of several tokens and {len(phrases) - len(longer)} stop ids under min_tokens are "
            f"more than the {MAX_PHRASES} entries there are: use fewer"
        )
    return TokenRules(
        allowed=None if allowed is None else tuple(sorted(set(allowed))),
        bias=tuple(sorted((bias or {}).items())),
        forbidden=tuple(sorted(word[0] for word in unique if len(word) == 1)),
        phrases=tuple(phrases),
    )


def spellings(words: Iterable[str], tokenizer: Any) -> list[tuple[int, ...]]:
    """Token ids of each word as a text starts with it and, where that differs, as it follows a space."""
    found = []
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if ids:
                found.append(ids)
    return found
