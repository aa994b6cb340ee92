"""Which backend serves what: the rule, measured tables, refusals in one sentence, and FlashInfer's signatures."""

from __future__ import annotations

import ast
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import attention.create
import attention.flashinfer.guards as guards
from attention import (
    AttentionShape,
    AttentionSpec,
    Bucket,
    ChoiceTable,
    CpuBackend,
    Machine,
    NativeBackend,
    ReferenceBackend,
    UnsupportedAttentionError,
    create_backend,
    read_lines,
)
from attention.flashinfer.guards import FA2, FA2_SPLIT, NAMES, SIGNATURES, XQA, check_parameters, unsupported
from attention.flashinfer.planner import PlanInfo

H200, A100, V100 = Machine((9, 0), 132), Machine((8, 0), 108), Machine((7, 0), 80)
LINE = {
    "rows": [1, 8], "query_len": [4, 4], "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "context": [0, 10**6],
    "backend": FA2_SPLIT,
}  # fmt: skip


def shape_of(**changes: Any) -> AttentionShape:
    settings = {
        "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "table_width": 512,
        "dtype": torch.bfloat16, "device": torch.device("cuda"), "specs": (AttentionSpec(0.1),), **changes,
    }  # fmt: skip
    return AttentionShape(**settings)


def test_the_rule() -> None:
    table = ChoiceTable(shape_of(), H200)
    chosen = {(rows, q): table.choose(Bucket(rows, q)).backend for rows in (1, 8, 32, 33, 64) for q in (1, 4, 6)}
    assert [chosen[rows, 4] for rows in (1, 8, 32, 33, 64)] == [XQA, XQA, XQA, FA2, FA2]  # 8 KV heads, 264 blocks fill
    assert chosen[64, 1] == FA2
    assert ChoiceTable(shape_of(), A100).choose(Bucket(1, 4)).backend == FA2_SPLIT  # XQA needs a newer GPU
    capped = shape_of(specs=(AttentionSpec(0.1), AttentionSpec(0.1, softcap=30.0)))
    assert ChoiceTable(capped, H200).choose(Bucket(1, 4)).backend == FA2_SPLIT


def test_a_measured_table_overrules_the_rule_where_it_fits(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text(json.dumps([LINE]))
    for lines in (read_lines(file), read_lines([LINE])):
        table = ChoiceTable(shape_of(), H200, lines)
        assert table.choose(Bucket(8, 4)) == (FA2_SPLIT, "measured")
        for bucket in (Bucket(9, 4), Bucket(8, 5)):
            assert table.choose(bucket).backend == XQA
        assert ChoiceTable(shape_of(head_dim=64), H200, lines).choose(Bucket(8, 4)).backend == XQA
    short = read_lines([{**LINE, "context": [0, 8191]}])
    assert ChoiceTable(shape_of(), H200, short).choose(Bucket(8, 4)).backend == XQA
    cannot = read_lines([{**LINE, "backend": XQA}])  # measured on a newer GPU than this one
    assert ChoiceTable(shape_of(), A100, cannot).choose(Bucket(8, 4)).backend == FA2_SPLIT
    text = ChoiceTable(shape_of(), H200, read_lines([LINE])).describe([Bucket(1, 4), Bucket(64, 4)])
    assert text.splitlines()[0].split() == ["rows", "1+k", "backend", "why"]
    assert "1     4    flashinfer_fa2_split  measured" in text
    assert "512 blocks fill the GPU" in text


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({**LINE, "backend": "magic"}, 'names "magic"'),
        ({**LINE, "rows": [8, 1]}, r"rows of the attention table must be \[first, last\]"),
        ({k: v for k, v in LINE.items() if k != "context"}, '"context" is amiss'),
        ({**LINE, "colour": 1}, '"colour" is amiss'),
    ],
)
def test_bad_lines_are_one_sentence(entry: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_lines([entry])


def test_bad_tables_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read the attention table"):
        read_lines(tmp_path / "none.json")
    (tmp_path / "table.json").write_text("{}")
    with pytest.raises(ValueError, match="must be a list of lines"):
        read_lines(tmp_path / "table.json")


@pytest.mark.parametrize(
    ("name", "changes", "machine", "sentence"),
    [
        (XQA, {"dtype": torch.float32}, H200, 'bfloat16 or float16, not torch.float32.*"reference"'),
        (XQA, {}, A100, f'compute capability 9, 10 or 12, this GPU has 8: use "{FA2}"'),
        (XQA, {"page_size": 8}, H200, f'page_size of 16, 32, 64 or 128, not 8.*"{FA2}"'),
        (XQA, {"head_dim": 264}, H200, 'up to 256, not 264.*"reference"'),
        (XQA, {"specs": (AttentionSpec(1.0, softcap=5.0),)}, H200, f'no soft cap.*"{FA2}"'),
        (FA2, {}, V100, '8.0 or newer.*"reference"'),
        (FA2_SPLIT, {"head_dim": 96}, H200, f'head sizes 64, 128 and 256, not 96: use "{XQA}"'),
    ],
)
def test_refusals_name_an_alternative(
    name: str, changes: dict[str, Any], machine: Machine, sentence: str, recwarn: pytest.WarningsRecorder
) -> None:
    table = ChoiceTable(shape_of(**changes), machine, only=name)
    with pytest.raises(UnsupportedAttentionError, match=sentence) as caught:
        table.choose(Bucket(1, 4))
    assert "\n" not in str(caught.value)


def test_a_head_size_that_one_kernel_lacks_is_served_by_the_other() -> None:
    assert unsupported(XQA, shape_of(head_dim=96), H200) is None
    assert ChoiceTable(shape_of(head_dim=96), H200).choose(Bucket(64, 4)).backend == XQA


def test_auto_without_a_gpu_is_the_cpu_backend_and_the_reference_stays_selectable() -> None:
    shape = shape_of(device=torch.device("cpu"))
    for name in ("auto", "cpu"):
        backend = create_backend(name, shape)
        assert backend.name == "cpu"
        assert isinstance(backend, CpuBackend | NativeBackend)
    assert isinstance(create_backend("reference", shape), ReferenceBackend)


def test_the_cpu_backend_is_refused_on_a_gpu() -> None:
    with pytest.raises(UnsupportedAttentionError, match='"cpu": the device is cuda; use "auto" or "reference"'):
        create_backend("cpu", shape_of())


def test_auto_on_a_gpu_without_flashinfer_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.create, "missing", lambda: "flashinfer-python is not installed: pip install it")
    with pytest.warns(UserWarning, match="torch reference, which is slow on a GPU: flashinfer-python is not installed"):
        assert isinstance(create_backend("auto", shape_of()), ReferenceBackend)
    with pytest.raises(UnsupportedAttentionError, match=r'"flashinfer_xqa": flashinfer-python.*"auto"'):
        create_backend(XQA, shape_of())


def test_auto_on_a_gpu_that_no_kernel_serves_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.create, "missing", lambda: None)
    monkeypatch.setattr(Machine, "of", staticmethod(lambda device: V100))
    with pytest.warns(UserWarning, match="compute capability 8.0 or newer"):
        assert isinstance(create_backend("auto", shape_of()), ReferenceBackend)


@pytest.mark.parametrize("name", NAMES)
def test_a_named_backend_without_a_gpu_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedAttentionError, match='FlashInfer needs a GPU, the device is cpu; use "auto"'):
        create_backend(name, shape_of(device=torch.device("cpu")))


def test_versions_and_plan_vectors_are_checked() -> None:
    for fine in ("0.6.17", "0.6.18.post1", "0.7.4", "1.0"):
        guards.check_version(fine)
    with pytest.raises(UnsupportedAttentionError, match=r"FlashInfer 0.6.9 is too old: install 0.6.17 or newer"):
        guards.check_version("0.6.9")
    with pytest.raises(UnsupportedAttentionError, match="takes no window_left; install"):
        check_parameters("decode:thing", {"window_left"}, {"q"}, "9.9")
    good = [*range(13), 1, 1]
    assert guards.parse_plan(good, split=True) == PlanInfo(*good)
    with pytest.raises(UnsupportedAttentionError, match="plan has 16 numbers, not 15"):
        guards.parse_plan([*good, 0], split=True)
    with pytest.raises(AssertionError, match="not one for graphs"):
        guards.parse_plan([*range(13), 0, 1], split=True)
    with pytest.raises(AssertionError, match="is split"):
        guards.parse_plan(good, split=False)


def parameters(tree: ast.Module, path: str) -> set[str]:
    """The parameter names of a function or method, read from source; overloads and inner plans included."""
    *owner, name = path.split(".")
    body = tree.body
    for part in owner:
        body = next(n.body for n in body if isinstance(n, ast.ClassDef) and n.name == part)
    names = {name, "_plan_impl"} if name == "plan" else {name}
    found = [n.args for n in body if isinstance(n, ast.FunctionDef) and n.name in names]
    return {a.arg for args in found for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)}


def wheels() -> list[Path]:
    return sorted(Path(os.environ.get("FLASHINFER_WHEELS", "nowhere")).glob("flashinfer_python-*.whl"))


@pytest.mark.flashinfer
def test_signatures_of_the_installed_version(host_planner: object) -> None:
    assert guards.load_flashinfer().__version__


@pytest.mark.flashinfer
@pytest.mark.skipif(not wheels(), reason="FLASHINFER_WHEELS names no folder of flashinfer_python wheels")
@pytest.mark.parametrize("wheel", wheels(), ids=lambda path: path.name.split("-")[1])
def test_signatures_of_other_versions(wheel: Path) -> None:
    """Read from the wheels, which need not be installed."""
    version = wheel.name.split("-")[1]
    guards.check_version(version)
    with zipfile.ZipFile(wheel) as archive:
        for target, needed in SIGNATURES.items():
            module, path = target.split(":")
            tree = ast.parse(archive.read(f"flashinfer/{module}.py"))
            check_parameters(target, needed, parameters(tree, path), version)
        plan = archive.read("flashinfer/data/include/flashinfer/attention/scheduler.cuh").decode()
    fields = plan[plan.index("struct PrefillPlanInfo {") : plan.index("PrefillPlanInfo()")]
    assert fields.split("{")[1].replace("int64_t", "").replace("bool", "").replace(";", "").split() == list(
        PlanInfo._fields
    )
