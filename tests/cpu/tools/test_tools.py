"""`gpu_check.py` and `build_kernels.py`."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from attention import ReferenceBackend, read_lines

TOOLS = Path(__file__).resolve().parents[3] / "tools"


@pytest.mark.flashinfer
def test_built_kernels_lie_where_flashinfer_looks_first(host_planner: object, tmp_path: Path) -> None:
    """With modules that are already built, so that no compiler runs; FlashInfer itself says that it finds them."""
    shape = ["--heads", "4", "--kv-heads", "2", "--head-dim", "64", "--num-draft", "3", "0", "--kinds", "xqa"]

    def python(*command: str, path: str = str(TOOLS)) -> list[str]:
        environment = {**os.environ, "PYTHONPATH": path, "FLASHINFER_CUDA_ARCH_LIST": "9.0a"}
        run = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=True)
        return run.stdout.splitlines()

    list_specs = f"import build_kernels as b\nfor spec in b.specs(b.parse({shape})): print(spec.name, spec.is_aot)"
    missing = python("-c", list_specs)
    assert [line.split()[1] for line in missing] == ["False", "False"]
    for name in (line.split()[0] for line in missing):
        (tmp_path / "flashinfer_jit_cache" / name).mkdir(parents=True)
        (tmp_path / "flashinfer_jit_cache" / name / f"{name}.so").write_bytes(b"built")
    assert "MB to carry" in python(str(TOOLS / "build_kernels.py"), *shape, "--out", str(tmp_path))[-1]
    assert [line.split()[1] for line in python("-c", list_specs, path=f"{tmp_path}:{TOOLS}")] == ["True"] * 2


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("gpu_check")


def test_gpu_check_runs_dry_on_the_cpu(gpu_check: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every kind of check, each line written with where it comes from, and the tables of the other tools; the budget
    names what it left out."""
    assert gpu_check.main(["--tiny", "--out", str(tmp_path)]) == 0
    tables = capsys.readouterr().out
    for heading in ("bound us  x light", "limit  bound ms", "device: total of the parts", "host: schedule"):
        assert heading in tables
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert all(line["ok"] and line["commit"] and line["device"] for line in lines)
    kinds = {"machine", "backends", "attention", "graph", "depth", "step", "lengths", "parts"}
    assert {line["check"].split()[0] for line in lines} == kinds
    assert {line["backends"] for line in lines if "backends" in line} == {"cpu reference"}
    checked = {line["bucket"]["backend"] for line in lines if "bucket" in line}
    assert checked == {line["backend"] for row in lines for line in row.get("lengths", ())} == {"cpu", "reference"}
    assert len({line["check"] for line in lines}) == len(lines)
    assert all(line["ms"] > 0 and line["vs_light"] > 0 for line in lines if line["check"].startswith("step"))
    assert gpu_check.main(["--tiny", "--out", str(tmp_path), "--budget-s", "-1"]) == 0
    assert "not reached" in (tmp_path / "table.md").read_text()
    assert "0 failed" in capsys.readouterr().out


@pytest.mark.parametrize("fault", [float("nan"), 1.1])
def test_gpu_check_fails_on_a_wrong_backend(
    gpu_check: Any, fault: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(ReferenceBackend):
        def attend(self, *args: Any) -> torch.Tensor:
            return super().attend(*args) * fault

    monkeypatch.setattr(gpu_check, "create_backend", lambda name, shape: Wrong())
    report = gpu_check.Report(tmp_path, {})
    plan = gpu_check.Plan(torch.device("cpu"), torch.float32, ("tiny",), (1, 3), (0, 2), 96, 2, False)
    report.run("attention", lambda: gpu_check.check_attention(plan, "tiny", "wrong", 3, 3))
    report.run("broken", lambda: 1 / 0)
    assert [row["check"] for row in report.failed] == ["attention", "broken"]
    assert report.failed[1]["error"] == "ZeroDivisionError: division by zero"


WORKER = """
import faulthandler, os, sys, time
from pathlib import Path
from lib.gpu_report import Report
report = Report(Path(sys.argv[1]), {"device": "fake"})
faulthandler.enable((report.out / "stack.txt").open("w"))

def crash(): os.kill(os.getpid(), 11)
def hang(): time.sleep(600)
def wrong(): return {"ok": False}
done = {row["check"] for row in report.rows()}
def right(): return {"ok": True}
for name, check in (("good", right), ("crash", crash), ("hang", hang), ("lost", wrong), ("last", right)):
    if name not in done and report.run(name, check)["check"] == "lost":
        sys.exit(3)
sys.exit(int(sys.argv[2]))
"""


def test_a_check_that_crashes_or_hangs_leaves_the_others_alive(gpu_check: Any, tmp_path: Path) -> None:
    supervised = importlib.import_module("lib.supervised")
    worker, report = tmp_path / "worker.py", gpu_check.Report(tmp_path, {})
    worker.write_text(f"import sys; sys.path[:0] = [{str(TOOLS)!r}, {str(TOOLS.parent)!r}]\n{WORKER}")
    command = [sys.executable, str(worker), str(tmp_path)]
    supervised.supervise([*command, "0"], report, time.monotonic() + 100, 4.0)
    found = {row["check"]: row for row in report.rows()}
    assert [row["check"] for row in report.rows()] == ["good", "crash", "hang", "lost", "last"]
    assert [row["ok"] for row in report.rows()] == [True, False, False, False, True]
    assert found["crash"]["error"] == "the process was ended by signal 11"
    assert "in crash" in found["crash"]["stack"]
    assert found["hang"]["error"] == "no answer for 4 s"
    assert "in hang" in found["hang"]["stack"]
    report.clear()
    supervised.supervise([*command, "5"], report, time.monotonic() - 1, 4.0)  # no time left, nothing begun
    assert [row["ok"] for row in report.rows()] == [False]


def test_gpu_check_writes_a_table_that_the_choice_of_backends_reads(gpu_check: Any) -> None:
    plan = gpu_check.Plan(torch.device("cpu"), torch.bfloat16, ("tiny",), (1, 3), (0, 2), 96, 2, False)

    def row(name: str, rows: int, us: float, ok: bool = True) -> dict[str, Any]:
        return {"ok": ok, "us": us, "bucket": {"model": "tiny", "backend": name, "rows": rows, "query_len": 3}}

    rows = [row("flashinfer_xqa", 1, 5.0), row("flashinfer_fa2", 1, 7.0), row("reference", 1, 1.0)]
    rows += [row("flashinfer_xqa", 8, 3.0, ok=False), row("flashinfer_fa2", 8, 7.0), {"ok": True}]
    table = gpu_check.choice_table(plan, rows)
    found = [(line["rows"], line["backend"]) for line in table]
    assert found == [([1, 1], "flashinfer_xqa"), ([2, 8], "flashinfer_fa2")]
    assert len(read_lines(table)) == 2
