"""What the documents say about the code is true."""

from __future__ import annotations

import re
from pathlib import Path

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
