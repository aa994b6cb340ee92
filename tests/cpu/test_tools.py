"""The tools run, on a tiny model, and say what they should."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from graphspec.sampling import SAMPLERS

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def graph_debug(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("graph_debug")


def test_the_plan_covers_every_batch_size(graph_debug: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert graph_debug.main(["plan", "--max-num-seqs", "9", "--num-speculative-tokens", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(s["batch"], s["rows"], s["positions"]) for s in result["sizes"]][-3:] == [
        (7, 8, 24),
        (8, 8, 24),
        (9, 9, 27),
    ]
    assert len(result["keys"]) == len(SAMPLERS) * 7
    assert graph_debug.main(["plan"]) == 0
    assert capsys.readouterr().out.startswith(f"{len(SAMPLERS) * 8} graphs: greedy, plain, bounded, sorted, ")


@pytest.mark.parametrize("command", ["guard", "inspect", "diff", "poison", "coverage"])
def test_the_engines_graphs_pass(
    graph_debug: Any, tiny_checkpoint: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [command, "--model", str(tiny_checkpoint), "--rows", "3", "--max-num-seqs", "4", "--max-tokens", "6"]
    assert graph_debug.main([*args, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert graph_debug.main(args) == 0
    text = capsys.readouterr().out
    if command == "coverage":
        assert result["steps"] > 10
        counts = re.search(r"(\d+) of (\d+) decode steps replayed a graph", text)  # of a run of its own
        assert counts is not None
        assert counts[1] == counts[2]
        assert int(counts[1]) > 10
    if command == "inspect":
        assert result["num_ops"] > 100
        assert "aten.mm.default" in text


def test_the_page_shows_plan_timeline_costs_and_findings(
    graph_debug: Any, tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    args = [
        "coverage",
        "--model",
        str(tiny_checkpoint),
        "--max-num-seqs",
        "4",
        "--max-tokens",
        "6",
        "--html",
        str(page),
    ]
    assert graph_debug.main(args) == 0
    text = page.read_text()
    assert "decode steps replayed a captured graph" in text
    assert "the guard found nothing" in text
    assert "4&#8239;&rarr;&#8239;4" in text
    assert "http" not in text  # self-contained


def test_guard_names_the_line_of_a_users_function(
    graph_debug: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = tmp_path / "mine_to_guard.py"
    module.write_text(
        "import torch\nfrom graphs import PersistentBuffers\nBUFFERS = PersistentBuffers()\n"
        "x = BUFFERS.add('x', torch.ones(3), writer='me')\n\n\ndef step():\n    return x * x.sum().item()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert graph_debug.main(["guard", "--function", "mine_to_guard:step"]) == 1
    out = capsys.readouterr().out
    assert f"{module}:8\n    host read: Tensor.item" in out
    assert "1 findings" in out


def test_the_scheduler_benchmark_prints_the_agreed_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    bench = importlib.import_module("bench_scheduler")
    args = ["bench_scheduler.py", "--requests", "4", "--num-draft", "3", "--steps", "20", "--json"]
    monkeypatch.setattr(sys, "argv", args)
    bench.main()
    line = json.loads(capsys.readouterr().out)
    assert line["host_us_per_request"] > 0
    assert {"commit", "device", "config", "schedule_us", "staging_us", "commit_us"} <= set(line)
