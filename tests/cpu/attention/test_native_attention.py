"""The CPU's attention in C++: bits that follow from a token alone, and where the library comes from."""

from __future__ import annotations

import logging
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from paged_launch import or_skip

import attention.cpu.native_library
from attention import (
    AttentionShape,
    AttentionSpec,
    AttnInputs,
    CpuBackend,
    NativeBackend,
    NoNativeError,
    UnsupportedAttentionError,
    create_backend,
)
from attention.cpu.native_library import find_compiler, load, native_library

ROOT = Path(__file__).resolve().parents[3]
Span = tuple[int, int, int]  # tokens `start : end` of a sequence


@pytest.fixture
def native() -> NativeBackend:
    return or_skip(NativeBackend)


@pytest.fixture
def compiler() -> list[str]:
    return or_skip(find_compiler)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """As in a process that has loaded no library, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    attention.cpu.native_library._library_or_reason.cache_clear()
    yield monkeypatch
    attention.cpu.native_library._library_or_reason.cache_clear()


class World:
    """Sequences of random lengths in one cache, all of whose tokens are known, so that any of them can be new."""

    def __init__(self, rng: random.Random, *, dim: int = 0, dtype: torch.dtype | None = None) -> None:
        kv_heads, self.page = rng.randint(1, 3), rng.choice((1, 5, 16, 48))
        self.heads, self.dim = kv_heads * rng.randint(1, 5), dim or rng.choice((20, 21, 64, 96))
        window, softcap = rng.choice((None, 1, rng.randint(2, 400))), rng.choice((None, None, 4.0))
        self.spec = AttentionSpec(self.dim**-0.5, window, softcap)
        dtype = dtype or rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
        self.lengths = [rng.randint(30, 900), *(rng.randint(8, 600) for _ in range(6))]
        torch.manual_seed(rng.randint(0, 1 << 30))
        width = -(-max(self.lengths) // self.page)
        self.tables = torch.randperm(len(self.lengths) * width).view(len(self.lengths), width).to(torch.int32)
        self.cache = torch.randn(self.tables.numel(), 2, kv_heads, self.page, self.dim).to(dtype)
        self.query = [torch.randn(n, self.heads, self.dim).to(dtype) for n in self.lengths]

    def attend(self, native: NativeBackend, spans: Sequence[Span], *, packed: bool) -> list[torch.Tensor]:
        """One launch in which the tokens of `spans` are new; the result `[tokens, Hq, D]` of each."""
        sizes = [end - start for _, start, end in spans]
        places = [(sequence, torch.arange(start, end)) for sequence, start, end in spans]
        slots = torch.cat([self.tables[s][p // self.page].long() * self.page + p % self.page for s, p in places])
        query = torch.cat([self.query[s][p] for s, p in places])
        new = (
            self.cache.transpose(2, 3).transpose(1, 2)[slots // self.page, slots % self.page].contiguous()
        )  # [T, 2, Hkv, D]
        rows = 1 if packed else len(spans)
        query, key, value = (t.view(rows, -1, *t.shape[1:]).transpose(1, 2) for t in (query, *new.unbind(1)))
        inputs = AttnInputs(
            self.tables[[s for s, _ in places]], torch.tensor([end for *_, end in spans], dtype=torch.int32),
            torch.tensor([0, *accumulate(sizes)], dtype=torch.int32), slots, 0 if packed else sizes[0],
        )  # fmt: skip
        out = native.attend(query, key, value, self.cache, inputs, self.spec).flatten(0, 1)
        return list(torch.split(out, sizes))


@pytest.mark.parametrize("seed", range(25))
def test_the_bits_of_a_token_follow_from_what_it_sees(native: NativeBackend, threads: None, seed: int) -> None:
    """Alone, among the new tokens of a step, beside other rows, in a prefill; by one thread or several."""
    check_bits(native, seed)


@pytest.mark.parametrize("choice", [*attention.cpu.native_library.CHOICES[2:], ("-mavx", "-fopenmp")])
def test_so_they_do_for_an_older_processor(
    native: NativeBackend, threads: None, compiler: list[str], unbuilt: pytest.MonkeyPatch, choice: tuple[str, ...]
) -> None:
    """Shorter vectors, and products that are rounded before they are added; near this processor's own results."""
    if "-mavx" in choice and "AVX" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("needs AVX")
    worlds = [World(random.Random(seed)) for seed in range(6)]
    spans = [[(s, n - 3, n) for s, n in enumerate(world.lengths)] for world in worlds]
    newer = [world.attend(native, which, packed=False) for world, which in zip(worlds, spans, strict=True)]
    unbuilt.setattr(attention.cpu.native_library, "CHOICES", (choice,))
    attention.cpu.native_library._library_or_reason.cache_clear()
    older = [world.attend(NativeBackend(), which, packed=False) for world, which in zip(worlds, spans, strict=True)]
    for ours, theirs in zip(older, newer, strict=True):
        torch.testing.assert_close(torch.cat(ours), torch.cat(theirs), rtol=1e-2, atol=1e-2)
    for seed in range(6):
        check_bits(native, seed)


def check_bits(native: NativeBackend, seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng)
    end = world.lengths[0]
    torch.set_num_threads(1)
    alone = [world.attend(native, [(0, p, p + 1)], packed=False)[0] for p in range(end - 8, end)]
    expected = torch.cat(alone)
    assert expected.isfinite().all()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        for new in range(1, 7):
            start = rng.randint(end - 8, end - new)
            others = [(s, n - new, n) for s, n in enumerate(world.lengths) if s]
            spans = [*others[: rng.randint(0, 6)], (0, start, start + new)]
            out = world.attend(native, spans, packed=False)[-1]
            assert torch.equal(out, expected[start - end + 8 :][:new])
        prompts = [(s, rng.randint(0, n - 1), n) for s, n in enumerate(world.lengths) if s]
        for start in (0, rng.randint(0, end - 8)):
            out = world.attend(native, [*prompts[: rng.randint(0, 6)], (0, start, end)], packed=True)[-1]
            assert torch.equal(out[-8:], expected)


@pytest.mark.parametrize("seed", range(25))
def test_what_lies_before_all_windows_is_not_read(native: NativeBackend, seed: int) -> None:
    rng = random.Random(seed)
    world, new = World(rng), rng.randint(1, 5)
    window = rng.randint(1, 100)
    world.spec = world.spec._replace(window=window)
    spans = [(s, n - new, n) for s, n in enumerate(world.lengths)]
    expected = world.attend(native, spans, packed=False)
    for sequence, start, _ in spans:
        before = torch.arange(max(0, start - window + 1))
        world.cache[world.tables[sequence][before // world.page].long(), :, :, before % world.page] = math.nan
    assert torch.equal(torch.cat(world.attend(native, spans, packed=False)), torch.cat(expected))


def test_a_launch_leaves_nothing_for_the_next(native: NativeBackend, threads: None) -> None:
    """Heads that fill no vector are padded where an earlier launch had what is not a number."""
    torch.set_num_threads(1)
    world, other = World(random.Random(1), dim=20), World(random.Random(1), dim=64, dtype=torch.bfloat16)
    other.cache.fill_(math.nan)
    (expected,) = world.attend(native, [(1, 7, 8)], packed=False)
    assert expected.isfinite().all()
    assert other.attend(native, [(1, 7, 8)], packed=False)[0].isnan().all()
    assert torch.equal(world.attend(native, [(1, 7, 8)], packed=False)[0], expected)


def shape() -> AttentionShape:
    return AttentionShape(4, 2, 64, 16, 8, torch.float32, torch.device("cpu"), (AttentionSpec(0.125),))


def test_without_openmp_one_thread_gives_the_same_bits(
    native: NativeBackend, threads: None, compiler: list[str], unbuilt: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.set_num_threads(2)
    world = World(random.Random(3))
    spans = [(s, n - 2, n) for s, n in enumerate(world.lengths)]
    expected = world.attend(native, spans, packed=False)
    (with_openmp,) = tmp_path.rglob("*.so")
    unbuilt.setattr(attention.cpu.native_library, "CHOICES", attention.cpu.native_library.CHOICES[1:])
    attention.cpu.native_library._library_or_reason.cache_clear()
    out = world.attend(NativeBackend(), spans, packed=False)
    assert torch.equal(torch.cat(out), torch.cat(expected))
    assert {*tmp_path.rglob("*.so")} > {with_openmp}


def test_an_openmp_that_torch_does_not_bring_is_done_without(
    compiler: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a compiler leaves open that nothing in the process defines."""
    source = tmp_path / "foreign.cpp"
    text = attention.cpu.native_library.SOURCE.read_text(encoding="utf-8")
    foreign = "#ifdef _OPENMP\nextern void no_such_runtime();\nvoid start() { no_such_runtime(); }\n#endif\n"
    source.write_text(text + foreign, encoding="utf-8")
    monkeypatch.setattr(attention.cpu.native_library, "SOURCE", source)
    assert load(compiler, tmp_path).paged_attention
    assert len(list(tmp_path.glob("*.so"))) == 2  # the first cannot be loaded


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"CXX": "/bin/false"}, r"^/bin/false failed: exit status 1$"),
        ({"CXX": "/nowhere/c++"}, r"^/nowhere/c\+\+: .*No such file"),
        ({"PATH": "/nowhere"}, r"^no C\+\+ compiler was found: set CXX or install one of c\+\+, g\+\+, clang\+\+$"),
    ],
)
def test_without_a_compiler_attention_runs_on_torch(
    unbuilt: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, environment: dict[str, str], reason: str
) -> None:
    unbuilt.delenv("CXX", raising=False)
    for name, value in environment.items():
        unbuilt.setenv(name, value)
    with caplog.at_level(logging.INFO, logger="attention"):
        backends = [create_backend("cpu", shape()), create_backend("auto", shape())]
    for backend in backends:
        assert isinstance(backend, CpuBackend)
        assert re.search(reason, backend.native_reason or "")
    assert len(caplog.records) == 1
    with pytest.raises(UnsupportedAttentionError, match=r'"cpu_native": .*; use "cpu_torch"'):
        create_backend("cpu_native", shape())


def test_a_dtype_without_a_kernel_runs_on_torch() -> None:
    backend = create_backend("cpu", replace(shape(), dtype=torch.float64))
    assert isinstance(backend, CpuBackend)
    assert backend.native_reason == "it knows torch.float32, torch.bfloat16, torch.float16, not torch.float64"


def test_a_cache_that_cannot_be_written_is_a_reason(compiler: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(NoNativeError, match="file"):
        load(compiler, tmp_path / "file")


def test_names_choose_the_path(native: NativeBackend) -> None:
    assert isinstance(create_backend("cpu", shape()), NativeBackend)
    assert isinstance(create_backend("cpu_native", shape()), NativeBackend)
    torch_backend = create_backend("cpu_torch", shape())
    assert isinstance(torch_backend, CpuBackend)
    assert torch_backend.native_reason is None


def test_a_library_is_built_once(compiler: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(compiler, tmp_path)
    (built,) = tmp_path.glob("*.so")
    before = built.stat()
    load(compiler, tmp_path)
    assert built.stat().st_ino == before.st_ino
    monkeypatch.setattr(attention.cpu.native_library, "FLAGS", (*attention.cpu.native_library.FLAGS, "-DOTHER"))
    load(compiler, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_two_processes_may_build_at_once(compiler: list[str], tmp_path: Path) -> None:
    code = "from attention.cpu.native_library import native_library; assert native_library().paged_attention"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    both = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [process.wait(300) for process in both] == [0, 0]
    assert len(list((tmp_path / "graphspec").iterdir())) == 1


def test_there_is_one_openmp_runtime(native: NativeBackend) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc to see what is loaded")
    native_library()
    loaded = {line.split()[-1] for line in maps.read_text().splitlines() if "/" in line}
    assert len({Path(name).resolve() for name in loaded if "libgomp" in name or "libomp" in name}) == 1
