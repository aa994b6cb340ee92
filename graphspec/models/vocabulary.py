"""Whether two models mean the same tokens by the same ids."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from graphspec.models.loading import model_path


def shared_ids(tokenizer: Any, draft_model: str | None) -> int | None:
    """How many ids `tokenizer` and the one that comes with `draft_model` have, added tokens included, to which both
    give the same tokens. None if one of the two is not there to be asked.

    Raises ValueError if `draft_model` comes without a tokenizer, or if the two differ: with the first id that does.
    """
    if tokenizer is None or draft_model is None:
        return None
    try:
        other = AutoTokenizer.from_pretrained(model_path(draft_model))
    except Exception as caught:
        raise ValueError(
            f'the draft model "{draft_model}" has no tokenizer that can be read, so nobody knows whether its ids mean '
            "what the model's mean: put the model's tokenizer beside it, or load it and pass the module to Engine"
        ) from caught
    ours, theirs = ({i: token for token, i in t.get_vocab().items()} for t in (tokenizer, other))
    count: int = 1 + max(*ours, *theirs)
    for token_id in range(count):
        if ours.get(token_id) != theirs.get(token_id):
            raise ValueError(
                f"token id {token_id} is {_name(theirs.get(token_id))} for the draft model and "
                f"{_name(ours.get(token_id))} for the model: use a draft model with the same tokenizer"
            )
    return count


def _name(token: str | None) -> str:
    return "no token" if token is None else f'"{token}"'
