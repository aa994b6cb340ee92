"""Prompt files: text lines, or the MT-bench jsonl form. No torch."""

from __future__ import annotations

import json
from pathlib import Path

BUILTIN_PROMPTS = Path(__file__).with_name("prompts.txt")


def read_prompts(path: Path, limit: int | None = None) -> list[str]:
    """The first `limit` prompts of a file: one per non-empty line, or per JSON object with "turns" (the first turn
    is taken) or "prompt".

    Raises ValueError, naming file and line, for a file that cannot be read or holds no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as caught:
        raise ValueError(f'cannot read the prompts file "{path}": {caught}') from caught
    numbered = [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ValueError(f'the prompts file "{path}" holds no prompt')
    is_json = path.suffix in (".jsonl", ".json")
    return [_from_json(line, path, number) if is_json else line for number, line in numbered[:limit]]


def _from_json(line: str, path: Path, number: int) -> str:
    try:
        entry = json.loads(line)
        prompt = entry["turns"][0] if "turns" in entry else entry["prompt"]
    except (ValueError, KeyError, IndexError, TypeError) as caught:
        raise ValueError(f'{path}:{number}: expected a JSON object with "turns" or "prompt"') from caught
    if not isinstance(prompt, str):
        raise ValueError(f"{path}:{number}: the prompt is not a string")
    return prompt
