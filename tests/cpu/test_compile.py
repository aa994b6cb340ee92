"""compile=True: the same text, and one sentence where no compiler is."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from same_text import NearTies, Scorer, assert_same_text

from graphs import check_compiler
from graphspec import Engine, EngineConfig, SamplingParams

CAN_COMPILE = shutil.which("g++") is not None and (Path(sysconfig.get_path("include")) / "Python.h").exists()


@pytest.mark.skipif(not CAN_COMPILE, reason="needs g++ and the Python headers")
def test_a_compiled_forward_gives_the_same_text() -> None:
    prompts = [[5, 6, 7, 8, 5, 6, 7], [9, 10, 11]]

    def run(**config: Any) -> list[list[int]]:
        with Engine(tiny_model(), config=EngineConfig(num_speculative_tokens=2, max_num_seqs=2, **config)) as engine:
            params = SamplingParams(max_tokens=20, ignore_eos=True)
            return [c.token_ids for c in engine.generate(prompts, params, progress=False)]

    ties, scorer = NearTies(), Scorer(tiny_model())
    for prompt, a, b in zip(prompts, run(), run(compile=True), strict=True):
        assert_same_text(scorer, prompt, a, b, ties)
    ties.check()


def test_a_missing_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"install g\+\+"):
        check_compiler(torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"install g\+\+"):
        Engine(tiny_model(), config=EngineConfig(compile=True))


def test_missing_headers_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/g++")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "nowhere")
    with pytest.raises(RuntimeError, match=r"Python headers \(nowhere/Python.h\): install python3-dev"):
        check_compiler(torch.device("cpu"))
