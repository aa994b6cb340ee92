"""What `pip install graphspec` gives: the wheel, built and installed into a fresh folder, run from an empty one."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("graphspec", "graphs", "attention")

# Runs the command, then says on stderr where every module of ours came from, and what it did not have to import.
RUN_AND_TELL = """
import json, sys
from graphspec.commands.main import main
before = sorted(sys.modules)
status = main(sys.argv[1:])
ours = {n: m.__file__ for n, m in sys.modules.items() if n.split(".")[0] in ("graphspec", "graphs", "attention")}
print(json.dumps({"ours": ours, "before": before}), file=sys.stderr)
sys.exit(status)
"""


def why_not() -> str:
    """Why no wheel can be built here; "" if one can."""
    try:
        importlib.metadata.version("pip")
        major = int(importlib.metadata.version("setuptools").split(".")[0])
    except importlib.metadata.PackageNotFoundError as missing:
        return f"{missing.name} is not there"
    return "" if major >= 77 else f"setuptools {major} is older than what pyproject.toml asks for"


class Installed:
    """The wheel in a folder of its own. Its Python sees that folder, the dependencies and nothing else: without `site`
    no .pth file of an editable install points to the checkout."""

    def __init__(self, folder: Path, empty: Path) -> None:
        self.folder, self._empty = folder, empty
        dependencies = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *dependencies])}

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", *arguments]
        run = subprocess.run(
            command, cwd=self._empty, env=self._environment, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr
        return run


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    if reason := why_not():
        pytest.skip(f"a wheel cannot be built here: {reason}")
    work = tmp_path_factory.mktemp("wheel")
    source, folder, empty = work / "source", work / "installed", work / "empty"
    for name in PACKAGES:  # a copy: setuptools builds in the source tree, and takes what an older build left there
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    empty.mkdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    for command in (
        [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(work), str(source)],
        [*pip, "install", "-q", "--no-deps", "--no-index", f"--find-links={work}", f"--target={folder}", "graphspec"],
    ):
        run = subprocess.run(command, cwd=empty, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
    return Installed(folder, empty)


def test_the_wheel_has_every_file_of_the_packages(installed: Installed) -> None:
    for name in PACKAGES:
        files = (path for path in (ROOT / name).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        missing = [path for path in files if not (installed.folder / path.relative_to(ROOT)).exists()]
        assert not missing


def test_the_wheel_looks_at_graphs(installed: Installed) -> None:
    out = installed.python("-m", "graphspec", "graphs", "plan", "--max-num-seqs", "5").stdout
    assert "5 row counts x 1 k" in out


def test_the_wheel_names_the_options_of_its_benchmarks(installed: Installed) -> None:
    out = installed.python("-m", "graphspec", "bench", "scheduler", "--help").stdout
    assert "usage: graphspec bench scheduler" in out
    assert "--prompt-tokens" in out


def test_the_wheel_measures_with_its_own_code(installed: Installed) -> None:
    """Not with the checkout's; outside of one a line names the version. Plots are not loaded for what draws none."""
    bench = ["bench", "scheduler", "--requests", "2", "--num-draft", "1", "--steps", "5", "--json"]
    run = installed.python("-c", RUN_AND_TELL, *bench)
    line = json.loads(run.stdout)
    assert line["commit"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert line["config"]["requests"] == 2
    told = json.loads(run.stderr.splitlines()[-1])
    assert {"graphspec.commands.bench.scheduler", "graphs.debug.page", "attention.backend"} <= set(told["ours"])
    assert {Path(path).is_relative_to(installed.folder) for path in told["ours"].values()} == {True}
    assert not {"matplotlib", "flashinfer"} & set(told["before"])
