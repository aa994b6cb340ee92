"""The scripts of tools/: those that are subcommands take the same options, the others run on a tiny model."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphspec.commands.main import BENCH, GRAPHS, main

TOOLS = Path(__file__).resolve().parents[3] / "tools"

Lines = list[dict[str, Any]]


class Tool:
    """A module of tools/, run as its command."""

    def __init__(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.module, self._capsys = importlib.import_module(name), capsys

    def text(self, *arguments: str) -> str:
        assert self.module.main(list(arguments)) == 0
        return self._capsys.readouterr().out

    def lines(self, *arguments: str) -> Lines:
        return [json.loads(line) for line in self.text(*arguments, "--json").splitlines()]


Tools = Callable[[str], Tool]


@pytest.fixture
def tool(known_rates: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tools:
    monkeypatch.syspath_prepend(str(TOOLS))
    return lambda name: Tool(name, capsys)


@pytest.fixture
def small(tiny_checkpoint: Path) -> list[str]:
    return ["--model", str(tiny_checkpoint)]


def options_of(run: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> str:
    """The help behind the usage, which names the program."""
    with pytest.raises(SystemExit):
        run()
    return capsys.readouterr().out.partition("\n\n")[2]


@pytest.mark.parametrize("name", BENCH)
def test_a_benchmark_is_a_script_with_the_same_options(
    tool: Tools, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tool(f"bench_{name}").module
    mine = options_of(lambda: script.main(["--help"]), capsys)
    assert mine == options_of(lambda: main(["bench", name, "--help"]), capsys)
    assert "options:" in mine


def test_scripts_run_what_the_subcommands_run(tool: Tools) -> None:
    (line,) = tool("bench_scheduler").lines("--requests", "4", "--num-draft", "3", "--steps", "20")
    assert (line["tool"], line["config"]["requests"]) == ("bench_scheduler", 4)
    short = ["--rows", "1", "--lengths", "8", "--repeats", "2", "--num-draft", "0"]
    assert tool("bench_attention").lines(*short)[0]["tool"] == "bench_attention"


@pytest.mark.parametrize("name", GRAPHS)
def test_the_graph_debugger_is_a_script_that_takes_every_option_with_every_subcommand(
    tool: Tools, small: list[str], name: str
) -> None:
    arguments = ["--rows", "3", name, *small, "--max-num-seqs", "4", "--max-tokens", "6", "--top", "3", "--json"]
    assert json.loads(tool("graph_debug").text(*arguments))


def test_speed_of_light_prints_ratios_with_and_without_speculation(tool: Tools, small: list[str]) -> None:
    command = tool("speed_of_light")
    options = [*small, "--rows", "1", "--num-draft", "0", "2", "--context", "8", "--steps", "3"]
    plain, drafted = command.lines(*options)
    assert (plain["emitted"], drafted["emitted"]) == (1.0, 2.0)
    assert plain["vs_light"] == pytest.approx(plain["token_vs_plain_light"])
    assert drafted["token_vs_plain_light"] < drafted["step_ms"] / plain["light_ms"]
    assert "x plain light" in command.text(*options)


FAKE_VLLM = """
import os, sys
from types import SimpleNamespace as Any
print("vLLM prints on stdout")
__version__ = "fake"
drafts = 0

class SamplingParams:
    def __init__(self, temperature, max_tokens):
        assert temperature == 0.0
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, **options):
        if options["max_num_seqs"] > 2:
            raise MemoryError("no room")
        assert os.environ["OMP_NUM_THREADS"] == "1" and options["enable_prefix_caching"] is False
        self.k = options.get("speculative_config", {}).get("num_speculative_tokens", 0)

    def get_metrics(self):
        names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
        return [Any(name=name, value=drafts * (i + 1)) for i, name in enumerate(names)]

    def generate(self, prompts, params, use_tqdm):
        global drafts
        drafts += self.k
        kept = Any(scheduled_ts=1.0, first_token_ts=1.5, last_token_ts=2.5)
        ids = [5 + i for i in range(params.max_tokens)]
        return [Any(outputs=[Any(token_ids=ids)], metrics=kept) for _ in prompts]
"""


@pytest.fixture
def fake_python(tmp_path: Path) -> str:
    """A Python in which `vllm` is the class above."""
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_peers_run_in_processes_of_their_own(tool: Tools, small: list[str], fake_python: str) -> None:
    options = [*small, "--peers", "vllm", "--vllm-python", fake_python, "--num-prompts", "2", "--max-tokens", "5"]
    plain, drafted = tool("compare_peers").lines(*options, "--rounds", "2", "--threads", "1")
    assert (plain["config"]["peer"], drafted["config"]["peer"]) == ("vllm", "vllm, k = 3 n-grams")
    assert (plain["config"]["versions"], plain["dtype"]) == ("vllm fake", "float32")
    assert (plain["same"], plain["ratio"], plain["mean_acceptance_length"]) == ("4/4", 1.0, 1.0)
    assert drafted["mean_acceptance_length"] == 3.0
    assert (drafted["ttft_p50_ms"], drafted["tpot_p50_ms"]) == (500.0, 250.0)
    assert drafted["token_vs_plain_light"] > 0


def test_a_peer_that_fails_is_named_with_the_cause(tool: Tools, small: list[str], fake_python: str) -> None:
    options = [*small, "--peers", "vllm", "--threads", "1", "--concurrency", "3"]
    command = tool("compare_peers")
    with pytest.raises(SystemExit, match="compare_peers: vllm failed: MemoryError: no room"):
        command.text(*options, "--vllm-python", fake_python)
    with pytest.raises(SystemExit, match="vllm failed: ModuleNotFoundError: No module named 'vllm'"):
        command.text(*options, "--vllm-python", sys.executable)
    with pytest.raises(SystemExit, match='cannot start "/no/python"'):
        command.text(*options, "--vllm-python", "/no/python")
    with pytest.raises(SystemExit, match="vllm needs --vllm-python"):
        command.text(*options)


def test_peers_give_equal_tokens_and_what_they_measured(tool: Tools, tiny_checkpoint: Path) -> None:
    """transformers plain, in batches and with prompt lookup, and graphspec: the same protocol, the same greedy text."""
    first = {"model": str(tiny_checkpoint), "dtype": "float32", "max_model_len": 128, "num_draft": 0}
    request = {"prompts": [[5, 6, 7, 5, 6], [9, 8, 7, 6, 5, 4, 3]], "max_tokens": 12}
    found = []
    for name, own in (
        ("lib.peer_transformers", {"concurrency": 2}),
        ("lib.peer_transformers", {"concurrency": 1, "num_draft": 3}),
        ("lib.peer_graphspec", {"concurrency": 2, "num_draft": 3}),
    ):
        run, versions = tool(name).module.start({**first, **own})
        assert "torch" in versions
        found.append(run(request))
    for answer in found:
        assert answer["token_ids"] == found[0]["token_ids"]
        assert len(answer["ttft"]) == len(answer["tpot"]) == 2
        assert answer["seconds"] > 0
    assert found[0]["mean_acceptance_length"] == 1.0
    assert found[1]["mean_acceptance_length"] >= 1.0


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("bench_generate", ["--ab", "no_such_field=1"], "depth=0,1"),
        ("compare_peers", ["--prompts-file", "nowhere.txt"], "cannot read the prompts file"),
        ("speed_of_light", ["--device", "abacus"], 'unknown device "abacus"'),
        ("speed_of_light", ["--plot", "nowhere/plot.png"], "a folder that exists"),
        ("graph_debug", ["guard", "--function", "step"], 'a function is named "module:name"'),
    ],
)
def test_bad_arguments_end_a_script_with_one_sentence(
    tool: Tools, small: list[str], name: str, arguments: list[str], sentence: str
) -> None:
    with pytest.raises(SystemExit, match=sentence) as caught:
        tool(name).text(*small, *arguments)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("graphspec graphs plan --max-num-seqs 8   # words", ""),
        ("graphspec --version", ""),
        ("make demo TORCH_INDEX=somewhere", ""),
        ("python tools/demo.py", ""),
        ("graphspec graphs plan --no-such-option", "graphspec does not take"),
        ("graphspec bench nothing", "graphspec does not take"),
        ("graphspec bench", "graphspec does not take"),
        ("make nothing", "which the Makefile lacks"),
        ("python tools/nothing.py", "which does not exist"),
    ],
)
def test_the_readme_check_knows_which_commands_exist(monkeypatch: pytest.MonkeyPatch, line: str, wrong: str) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    check_readme = importlib.import_module("check_readme")
    page = f"Words and `{line}`.\n```sh\n{line}\n```\n```python\nmake nothing\n```\n"
    assert list(check_readme.commands(page)) == [line, line]
    if not wrong:
        check_readme.check_command(line, {"demo"})
        return
    with pytest.raises(AssertionError, match=wrong):
        check_readme.check_command(line, {"demo"})
