"""The dependency direction: tools, tests -> graphspec -> {graphs, attention} -> torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import attention
import graphs
import graphspec

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {"graphs": {"graphs"}, "attention": {"attention"}, "graphspec": {"graphspec", "graphs", "attention"}}
NO_TORCH = ["request", "pages", "slots", "scheduler", "step", "stats", "text", "prompts"]


def imported(path: Path) -> Iterator[str]:
    """Top-level names of everything a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module).split(".")[0]


def test_no_package_imports_upward_or_sideways() -> None:
    for package, allowed in ALLOWED.items():
        for path in (ROOT / package).rglob("*.py"):
            wrong = set(imported(path)) & ({*ALLOWED, "tests", "tools"} - allowed)
            assert not wrong, f"{path} imports {wrong}"


def test_host_only_files_import_no_torch() -> None:
    for name in NO_TORCH:
        assert not {"torch", "transformers"} & set(imported(ROOT / "graphspec" / f"{name}.py")), name


def test_packages_come_from_this_checkout() -> None:
    for package in (graphspec, graphs, attention):
        assert Path(str(package.__file__)).resolve().parent.parent == ROOT
