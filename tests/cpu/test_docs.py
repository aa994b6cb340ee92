"""What the documents say about the code is true."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from attention import AttentionShape, AttentionSpec, Bucket, ChoiceTable, Machine

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_named_in_the_scenario_table_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "SCENARIOS.md").read_text(encoding="utf-8")))
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    defined = {name for source in sources for name in re.findall(r"def (test_\w+)\(", source)}
    assert len(named) > 30
    assert named <= defined, named - defined


def test_every_file_on_the_map_exists() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`[^|]+`) \|", readme.split("\n## Map\n")[1].split("\n## ")[0], re.M)
    assert len(cells) > 5
    for cell in cells:
        names = re.findall(r"`([\w/.]+)`", cell)
        folder = Path(names[0]).parent if "." in names[0] else Path()
        for name in names:
            assert (ROOT / name).exists() or (ROOT / folder / name).exists(), name


LINK = re.compile(r"\[`([^`]+)`\]\(([^)#]+)\)")


def names_in(path: Path) -> set[str]:
    """Dotted names of what a module defines: functions, classes, their methods and fields."""
    found: set[str] = set()

    def visit(body: Iterable[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(prefix + node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(prefix + node.target.id)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")

    visit(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found


def test_the_architecture_names_what_exists_where_it_says() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    links = LINK.findall(text)
    assert len(links) > 40
    for name, target in links:
        assert name in names_in(ROOT / "docs" / target), f"{name} is not in {target}"
    linked = {name for name, _ in links}
    sources = [path for room in ("graphspec", "graphs", "attention") for path in (ROOT / room).rglob("*.py")]
    everywhere = {name for path in sources for name in names_in(path)}
    fields = {name.rpartition(".")[2] for name in everywhere}
    for name in re.findall(r"`([^`]+)`", LINK.sub("", re.sub(r"```.*?```", "", text, flags=re.DOTALL))):
        known = name in linked | everywhere | fields or ("/" in name and (ROOT / name).exists())
        assert known, f"{name} is no file, and nothing that this page links to or the packages define"
    classes = {name for name in everywhere if name[0].isupper()}
    picture = re.findall(r"\b[A-Z]\w+[a-z]\w*(?:\.\w+)?\b", text.split("```")[1])
    assert {name for name in picture if "." in name or re.search(r"[a-z][A-Z]", name)} <= classes


def test_the_kernel_for_8_rows_on_an_h200_is_the_one_that_is_named() -> None:
    shape = AttentionShape(32, 8, 128, 16, 512, torch.bfloat16, torch.device("cuda"), (AttentionSpec(scale=128**-0.5),))
    table = ChoiceTable(shape, Machine(capability=(9, 0), num_sms=132))
    chosen = {rows: table.choose(Bucket(rows, 4)) for rows in (8, 32, 33)}
    assert {rows: choice.backend for rows, choice in chosen.items()} == {
        8: "flashinfer_xqa", 32: "flashinfer_xqa", 33: "flashinfer_fa2",
    }  # fmt: skip
    assert chosen[8].reason.startswith("64 of 264 blocks")


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))])
def test_every_link_leads_to_a_file(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        assert target.startswith("http") or (ROOT / page).parent.joinpath(target).exists(), target
