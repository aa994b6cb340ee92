"""The direction of imports. This table is the one place where it is written down.

tools, tests -> graphspec -> {graphs, attention} -> torch
commands -> engine -> {scheduling, execution};  execution -> drafting -> {sampling, models};  everything -> records
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import attention
import graphs
import graphspec

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {"graphs": {"graphs"}, "attention": {"attention"}, "graphspec": {"graphspec", "graphs", "attention"}}

# What each room of graphspec may import besides itself.
ROOMS: dict[str, set[str]] = {
    "records": set(),
    "scheduling": {"records"},
    "sampling": {"records"},
    "models": {"records"},
    "drafting": {"records", "sampling", "models"},
    "execution": {"records", "sampling", "models", "drafting"},
    "engine": {"records", "scheduling", "models", "execution"},
    "commands": {"records", "scheduling", "sampling", "models", "drafting", "execution", "engine"},
}
NO_TORCH = ["records", "scheduling"]


def modules_imported(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module)


def imported(path: Path) -> set[str]:
    return {name.split(".")[0] for name in modules_imported(path)}


def test_no_package_imports_upward_or_sideways() -> None:
    for package, allowed in ALLOWED.items():
        for path in (ROOT / package).rglob("*.py"):
            wrong = imported(path) & ({*ALLOWED, "tests", "tools"} - allowed)
            assert not wrong, f"{path} imports {wrong}"


def test_no_room_imports_upward() -> None:
    assert {path.parent.name for path in (ROOT / "graphspec").glob("*/__init__.py")} == set(ROOMS)
    for room, allowed in ROOMS.items():
        for path in (ROOT / "graphspec" / room).rglob("*.py"):
            own = [name.split(".") for name in modules_imported(path) if name.split(".")[0] == "graphspec"]
            wrong = {".".join(name) for name in own if len(name) < 2 or name[1] not in {room, *allowed}}
            assert not wrong, f"{path} imports {wrong}"


def test_the_rooms_form_no_cycle() -> None:
    below: dict[str, set[str]] = {}
    for room, allowed in ROOMS.items():  # in order: a room only imports what stands above it in the table
        assert allowed <= set(below), room
        below[room] = allowed


def test_host_only_rooms_import_no_torch() -> None:
    for room in NO_TORCH:
        for path in (ROOT / "graphspec" / room).rglob("*.py"):
            assert not {"torch", "transformers"} & imported(path), path


def test_every_room_says_what_it_is() -> None:
    for path in [*(ROOT / "graphspec").glob("*/__init__.py"), *(ROOT / "attention").glob("*/__init__.py")]:
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path


def test_packages_come_from_this_checkout() -> None:
    for package in (graphspec, graphs, attention):
        assert Path(str(package.__file__)).resolve().parent.parent == ROOT
