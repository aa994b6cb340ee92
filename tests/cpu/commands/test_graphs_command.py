"""`graphspec graphs`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from graphspec.commands.main import main
from graphspec.sampling.keyed_sampling import SAMPLERS


def test_the_plan_covers_every_batch_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graphs", "plan", "--max-num-seqs", "9", "--num-speculative-tokens", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(s["batch"], s["rows"], s["positions"]) for s in result["sizes"]][-3:] == [
        (7, 8, 24),
        (8, 8, 24),
        (9, 9, 27),
    ]
    assert len(result["keys"]) == len(SAMPLERS) * 7
    assert main(["graphs", "plan", "--attention", "32", "8", "128"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{len(SAMPLERS) * 8} graphs: 8 row counts x 1 k x {len(SAMPLERS)} samplers")
    assert "flashinfer_xqa" in text


@pytest.mark.parametrize("command", ["guard", "inspect", "diff", "poison", "coverage"])
def test_the_engines_graphs_pass(tiny_checkpoint: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["graphs", command, "--model", str(tiny_checkpoint), "--rows", "3"]
    if command == "coverage":
        args += ["--max-num-seqs", "4", "--max-tokens", "6"]
    assert main([*args, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert main(args) == 0
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
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    args = ["graphs", "coverage", "--model", str(tiny_checkpoint), "--html", str(page)]
    args += ["--max-num-seqs", "4", "--max-tokens", "6"]
    assert main(args) == 0
    text = page.read_text()
    assert "decode steps replayed a captured graph" in text
    assert "the guard found nothing" in text
    assert "4&#8239;&rarr;&#8239;4" in text
    assert "http" not in text  # self-contained


def test_guard_names_the_line_of_a_users_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = tmp_path / "mine_to_guard.py"
    module.write_text(
        "import torch\nfrom graphs import PersistentBuffers\nBUFFERS = PersistentBuffers()\n"
        "x = BUFFERS.add('x', torch.ones(3), writer='me')\n\n\ndef step():\n    return x * x.sum().item()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["graphs", "guard", "--function", "mine_to_guard:step"]) == 1
    out = capsys.readouterr().out
    assert f"{module}:8\n    host read: Tensor.item" in out
    assert "1 findings" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["plan", "--graph-rows", "1", "2", "--max-num-seqs", "4"], "the last rung must be 4, not 2"),
        (["guard", "--function", "no_such_module:step"], 'there is no module "no_such_module" on the path'),
        (["inspect", "--device", "cpu", "--dot", "graph.dot"], "it needs --device cuda"),
        (["coverage", "--html", "nowhere/page.html"], "a folder that exists"),
    ],
)
def test_bad_input_is_one_line_on_stderr(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["graphs", *arguments]) == 2
    err = capsys.readouterr().err.strip()
    assert err.startswith("graphspec: ")
    assert sentence in err
    assert "\n" not in err
