"""compile=True: the same text, and one sentence where no compiler is."""

from __future__ import annotations

import shutil
import sysconfig
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch._inductor.metrics
from conftest import tiny_model
from same_text import NearTies, Scorer, assert_same_text

from graphs import PersistentBuffers, RegionCompiler, capture, check_compiler, compare_replay, record
from graphspec import Engine, EngineConfig, SamplingParams

CAN_COMPILE = shutil.which("g++") is not None and (Path(sysconfig.get_path("include")) / "Python.h").exists()


@pytest.mark.skipif(not CAN_COMPILE, reason="needs g++ and the Python headers")
def test_a_compiled_forward_gives_the_same_text() -> None:
    prompts = [[5, 6, 7, 8, 5, 6, 7], [9, 10, 11]]

    def run(**config: Any) -> list[list[int]]:
        with Engine(tiny_model(), config=EngineConfig(num_speculative_tokens=2, max_num_seqs=2, **config)) as engine:
            params = SamplingParams(max_tokens=20, ignore_eos=True)
            return [c.token_ids for c in engine.generate(prompts, params, progress=False)]

    ties, scorer = NearTies(), Scorer(tiny_model())
    for prompt, a, b in zip(prompts, run(), run(compile=True), strict=True):
        assert_same_text(scorer, prompt, a, b, ties)
    ties.check()


class Toy:
    """Layers of equal structure around an op that stays as it is, with updates in place through views."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights = [torch.randn(4, 4, generator=generator) for _ in range(3)]
        self.x, self.total, self.count = torch.ones(2, 4), torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
        self.buffers = PersistentBuffers()
        for name in ("x", "total", "count"):
            self.buffers.add(name, getattr(self, name), writer="step")

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.x * 1
        for weight in self.weights:
            hidden = torch.tanh(hidden @ weight) + hidden
            hidden = torch.ops.toy.opaque(hidden)
        self.total[0].add_(hidden.sum(0))  # a view of a buffer, then the buffer itself
        self.total[1:] += self.total[0]
        self.count.index_copy_(0, self.count[:1] % 3, self.count[:1] + 7)
        self.count.select(0, 2).zero_()
        return hidden.argmax(-1), self.count + 1


torch.library.define("toy::opaque", "(Tensor x) -> Tensor")
torch.library.impl("toy::opaque", "CompositeExplicitAutograd", lambda x: x * 2)


@pytest.mark.skipif(not CAN_COMPILE, reason="needs g++ and the Python headers")
def test_a_compiled_record_updates_the_same_buffers_and_compiles_equal_layers_once() -> None:
    toy, twin, compiler = Toy(), Toy(), RegionCompiler()
    compiled = capture(toy.step, toy.buffers, key="toy", backend=partial(record, rewrite=compiler))
    plain = capture(twin.step, twin.buffers, key="toy", backend=record)
    assert compiler.num_compiled == 3  # before the first opaque op, between two, after the last
    assert compiled.program.num_ops == 3 + 4
    assert plain.contract.baked == compiled.contract.baked
    for step in range(4):
        for x in (toy.x, twin.x):
            x.fill_(0.1 * step)
        for a, b in zip(compiled.replay(), plain.replay(), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(toy.count, twin.count)
        torch.testing.assert_close(toy.total, twin.total)
    assert compiler.num_compiled == 3
    with pytest.raises(ValueError, match="no bit-equal oracle"):
        compare_replay(compiled)


@pytest.mark.skipif(not CAN_COMPILE, reason="needs g++ and the Python headers")
def test_another_process_finds_on_disk_what_was_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each compiler stands for a process: it knows nothing of the one before it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    outputs = []
    for name in ("fxgraph_cache_miss", "fxgraph_cache_hit"):
        torch._dynamo.utils.counters.clear()
        toy, compiler = Toy(), RegionCompiler()
        program, _ = record(toy.step, compiler)
        found = torch._dynamo.utils.counters["inductor"]
        assert {n: found[n] for n in found if n.startswith("fxgraph_cache")} == {name: compiler.num_compiled}
        outputs.append(program.run())
    for first, second in zip(*outputs, strict=True):
        assert torch.equal(first, second)


@pytest.mark.skipif(not CAN_COMPILE, reason="needs g++ and the Python headers")
def test_nothing_is_compiled_after_start_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """By our counter and by torch's: prefill chunks of any length, every batch size, each sampler there is (two here,
    to compile less)."""
    monkeypatch.setattr("graphspec.execution.runner.SAMPLERS", ("greedy", "bounded"))
    config = EngineConfig(
        num_speculative_tokens=1, max_num_seqs=2, graph_rows=(2,), max_model_len=64, compile=True, capture="eager"
    )
    with Engine(tiny_model(), config=config) as engine:
        before, kernels = engine.stats(), torch._inductor.metrics.generated_cpp_vec_kernel_count
        frames = sum(torch._dynamo.utils.counters["frames"].values())
        assert before.num_compiled_regions > 3
        prompts = [[5 + i % 9 for i in range(n)] for n in (1, 4, 9, 17)]
        params = [SamplingParams(max_tokens=6, temperature=t, top_k=k, seed=1) for t, k in ((0, 0), (1, 5)) * 2]
        engine.generate(prompts, params, progress=False)
        after = engine.stats()
    assert (after.num_compiled_regions, after.num_graphs) == (before.num_compiled_regions, before.num_graphs)
    assert torch._inductor.metrics.generated_cpp_vec_kernel_count == kernels
    assert sum(torch._dynamo.utils.counters["frames"].values()) == frames


def test_a_missing_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"install g\+\+"):
        check_compiler(torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"install g\+\+"):
        Engine(tiny_model(), config=EngineConfig(compile=True))
    with pytest.raises(RuntimeError, match=r"install g\+\+"):  # before it is loaded
        Engine.from_pretrained("no-such-model", EngineConfig(compile=True, device="cpu"))


def test_missing_headers_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/g++")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "nowhere")
    with pytest.raises(RuntimeError, match=r"Python headers \(nowhere/Python.h\): install python3-dev"):
        check_compiler(torch.device("cpu"))
