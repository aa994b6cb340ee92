"""The benchmarks run, on a tiny model, and their numbers mean what they say."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model

from graphspec.models.packed_linears import has_fbgemm
from graphspec.records.launch import DecodeRows, RowResults, StepPlan, StepResult

TOOLS = Path(__file__).resolve().parents[3] / "tools"

Lines = list[dict[str, Any]]


class Tool:
    """A module of tools/, run as its command."""

    def __init__(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.name, self.module, self._capsys = name, importlib.import_module(name), capsys

    def text(self, *arguments: str) -> str:
        self.module.main(list(arguments))
        return self._capsys.readouterr().out

    def lines(self, *arguments: str) -> Lines:
        return [json.loads(line) for line in self.text(*arguments, "--json").splitlines()]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Tools on a machine that reads 1 GB/s and multiplies 1 GFLOP/s."""
    monkeypatch.syspath_prepend(str(TOOLS))
    light = importlib.import_module("speed_of_light")
    for rate in ("read_bandwidth", "matrix_rate"):
        monkeypatch.setattr(light, rate, lambda *_: 1e9)
    light.measured_rates.cache_clear()
    yield lambda name: Tool(name, capsys)
    light.measured_rates.cache_clear()


@pytest.fixture
def small(tiny_checkpoint: Path) -> list[str]:
    return ["--model", str(tiny_checkpoint)]


STEP = ["--rows", "2", "--context", "16", "--steps", "4", "--rounds", "1"]
DEVICE_PARTS = ["inputs", "lookup + launch", "correct", "forward", "verify", "update", "draft", "output"]
HOST_PARTS = {"schedule", "staging", "submit", "wait for the device", "read-back", "commit", "detokenise", "other"}


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_a_step_is_taken_apart(tool: Any, small: list[str], mode: str) -> None:
    lines = tool("bench_step").lines(*small, *STEP, "--num-draft", "2", "--depth", "0", "1", "--modes", mode)
    assert [line["config"]["depth"] for line in lines] == [0, 1]
    for line in lines:
        parts = line["parts"]
        assert list(parts["device"]) == [*DEVICE_PARTS, "read-back copies"]
        assert set(parts["host"]) == HOST_PARTS
        assert {"commit", "device", "dtype", "config", "device_ms_p90", "device_ms_p99", "idle_us"} <= set(line)
        assert line["emitted"] == 2.0  # one of two drafts is accepted, and the bonus
        assert line["config"]["dtype"] == "auto"
        assert line["dtype"] == "float32"
    assert (lines[0]["stretch"], lines[0]["vs_first"]) == (1.0, 1.0)


def test_growth_with_the_context_stands_beside_that_of_kv(tool: Any, small: list[str]) -> None:
    steps = [*small, *STEP, "--num-draft", "0", "2", "--depth", "0"]
    steps[steps.index("16") : steps.index("16") + 1] = ["16", "48"]
    lines = tool("bench_step").lines(*steps)
    assert [(line["config"]["context"], line["config"]["num_draft"]) for line in lines] == [
        (16, 0), (16, 2), (48, 0), (48, 2)
    ]  # fmt: skip
    assert [line["growth_ms"] for line in lines[:2]] == [None, None]
    for line, shorter in zip(lines[2:], lines[:2], strict=True):
        assert line["growth_ms"] == pytest.approx(line["device_ms"] - shorter["device_ms"], abs=1e-4)  # one round
        assert line["growth_kv_ms"] == pytest.approx(lines[2]["growth_kv_ms"])
        assert line["growth_kv_ms"] > 0


def test_parts_of_a_step_add_up(tool: Any) -> None:
    clocks = tool("step_parts").module
    parts = clocks.parts_between([("a", 2.0), ("b", 5.0), ("a", 6.0)], 1.0, 10.0)
    assert parts == {"inputs": 1.0, "a": 7.0, "b": 1.0}


def test_the_clocks_account_for_the_whole_step(tool: Any) -> None:
    """Device parts add up to the time between the ends of the launch, host parts to that of the call, nothing twice;
    tokens are those of the step that is not taken apart, and the engine is as before afterwards."""
    clocks, load = tool("step_parts").module, tool("decode_load").module
    from graphspec import Engine, EngineConfig, SamplingParams

    def tokens(apart: bool) -> list[int]:
        found: list[int] = []
        with Engine(tiny_model(), config=EngineConfig(depth=0, max_model_len=256)) as engine:
            device, host = clocks.DeviceClock(engine), clocks.HostClock(engine)
            before = engine._runner.decode_step._iteration
            engine.add_request([5, 6, 7, 5, 6], SamplingParams(max_tokens=60, ignore_eos=True))
            load.step_until_all_decode(engine)
            if apart:
                with device.attached(), host.attached():
                    for _ in range(4):
                        found += engine.step()[0].new_token_ids
                busy = list(engine._pipeline.times.busy)[-4:]
                assert [sum(parts.values()) for parts in device.steps] == pytest.approx(busy)
                assert all(min(parts.values()) >= 0 for parts in (*device.steps, *host.steps))
                assert engine._pipeline.times.host[-1] < sum(host.steps[-1].values())  # which waits, too
                assert engine._runner.decode_step._iteration is before
                assert "step" not in vars(engine)
                assert "_wait" not in vars(engine._pipeline)
                assert "process" not in vars(engine._output_processor)
            while engine.has_unfinished_requests():
                found += [token for output in engine.step() for token in output.new_token_ids]
        return found

    assert tokens(True) == tokens(False)


def test_what_a_step_must_move_is_counted_by_hand(tool: Any) -> None:
    """The tiny model: 3 layers, hidden 48, 4 query and 2 KV heads of 12, intermediate 96, 211 tokens, head untied."""
    light = tool("speed_of_light").module
    work = light.ModelWork.of(tiny_model())
    per_layer = 48 * 48 + 2 * 48 * 24 + 48 * 48 + 3 * 48 * 96  # q, k and v, o; gate, up, down
    matrices = 3 * per_layer + 48 * 211
    norms = 3 * 2 * 48 + 48
    assert (work.weights, work.matrix_elements) == (4 * (matrices + norms), matrices)

    step = work.step(rows=2, query_len=3, context=10)
    assert step.weight_bytes == 4 * (matrices + norms) + 6 * 48 * 4  # and six rows of the embedding
    assert step.kv_bytes == 3 * 2 * (10 + 3 + 3) * 2 * 2 * 12 * 4  # layers x rows x tokens x K and V x heads x size
    assert step.logit_bytes == 2 * 6 * 211 * 4
    assert step.operations == 2 * 6 * matrices + 3 * 2 * (11 + 12 + 13) * 4 * 4 * 12
    assert step.num_bytes == step.weight_bytes + step.kv_bytes + step.logit_bytes

    model = tiny_model()
    up = model.get_parameter("model.layers.0.mlp.up_proj.weight")
    packed = light.ModelWork.of(model, {id(up)})
    assert (packed.weights, packed.packed) == (4 * (matrices + norms) - 2 * 48 * 96, 2 * 48 * 96)

    windowed = light.ModelWork.of(tiny_model("mistral")).step(1, 1, 100)
    assert windowed.kv_bytes == 3 * (24 + 2) * 2 * 2 * 12 * 4
    rates = light.Rates(bytes_per_s=1e6, operations_per_s=1e12)
    assert rates.seconds(step) == step.num_bytes / 1e6
    assert light.Rates(1e12, 1e6).seconds(step) == step.operations / 1e6


def test_the_bound_of_a_launch_follows_its_rows_and_true_lengths(tool: Any) -> None:
    import numpy as np

    light = tool("speed_of_light").module
    bound = light.StepBound(light.Rates(1e9, 1e15), light.ModelWork.of(tiny_model()))
    ints = np.zeros(2, np.int64)
    rows = DecodeRows(ints, ints, ints, np.zeros((2, 4), np.int32), 3, "greedy")
    result = StepResult(None, RowResults(ints, ints, np.array([10, 30]), ints, np.zeros((2, 4), np.int64)))
    plan = StepPlan(0, (), None, rows, num_draft_next=3)
    assert bound.launch_seconds(plan, result) == bound.seconds(2, 3, 20.0)
    ratios = bound.ratios(2 * bound.seconds(2, 3, 20.0), 2, 3, 20.0, emitted=4.0)
    assert ratios["vs_light"] == 2.0
    assert ratios["token_vs_plain_light"] < 2.0  # the weights of one step served four tokens


@pytest.mark.skipif(not has_fbgemm(), reason="needs FBGEMM and AVX2")
def test_the_bound_counts_what_an_engine_reads(tool: Any) -> None:
    """Weights that half precision holds are read packed: all of this model but the ones of its norms."""
    from graphspec import Engine, EngineConfig

    light = tool("speed_of_light").module
    model = tiny_model()
    for parameter in model.parameters():
        parameter.copy_(parameter.half())
    matrices = light.ModelWork.of(model).matrix_elements
    for pack, item in ((None, 2), (False, 4)):
        with Engine(model, config=EngineConfig(pack_weights=pack, max_model_len=64)) as engine:
            bound = light.StepBound.of(light.Rates(1e9, 1e15), engine)
            norms = 4 * (3 * 2 * 48 + 48)
            assert bound.model.weights == item * matrices + norms
            assert bound.model.packed == (2 * matrices if item == 2 else 0)
            assert bound.seconds(1, 0, 8) > bound.model.weights / 1e9
            assert f"{bound.model.packed / 1e6:.1f} MB of packed" in bound.counted


def test_rates_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    light = importlib.import_module("speed_of_light")
    assert light.read_bandwidth(torch.device("cpu"), 1 << 20) > 1e6
    assert light.matrix_rate(torch.device("cpu"), torch.float32) > 1e6


def test_speed_of_light_prints_ratios_with_and_without_speculation(tool: Any, small: list[str]) -> None:
    command = tool("speed_of_light")
    options = [*small, "--rows", "1", "--num-draft", "0", "2", "--context", "8", "--steps", "3"]
    plain, drafted = command.lines(*options)
    assert (plain["emitted"], drafted["emitted"]) == (1.0, 2.0)
    assert plain["vs_light"] == pytest.approx(plain["token_vs_plain_light"])
    assert drafted["token_vs_plain_light"] < drafted["step_ms"] / plain["light_ms"]
    assert "x plain light" in command.text(*options)


def test_attention_cost_follows_the_true_length(tool: Any, tmp_path: Path) -> None:
    """Block tables for 16,384 tokens; what a short row costs is far from what a long one costs."""
    options = ["--lengths", "32", "8192", "--capacity", "16384", "--rows", "2", "--repeats", "3", "--num-draft", "3"]
    lines = tool("bench_attention").lines(*options, "--backends", "reference", "auto")
    assert [line["config"]["length"] for line in lines] == [32, 32, 8192, 8192]
    assert [line["config"]["backend"] for line in lines] == ["reference", "auto"] * 2
    assert lines[2]["us"] > 5 * lines[0]["us"]
    assert all(line["vs_light"] == pytest.approx(line["us"] / line["light_us"]) for line in lines)
    assert lines[2]["light_us"] == pytest.approx(1e6 * 4 * 9 * 64 * 2 * 4 * (8192 - 1.5) / 1e9)


def test_bench_generate_runs_variants_side_by_side(tool: Any, small: list[str]) -> None:
    bench = tool("bench_generate")
    options = [*small, "--num-prompts", "4", "--concurrency", "2", "--max-tokens", "8", "--rounds", "2"]
    first, second = bench.lines(*options, "--ab", "depth=0,1")
    assert (first["config"]["depth"], second["config"]["depth"]) == (0, 1)
    assert (first["ratio"], first["same_tokens"], second["same_tokens"]) == (1.0, True, True)
    assert first["mean_acceptance_length"] == second["mean_acceptance_length"]
    assert all(first[f"{name}_p50_ms"] > 0 for name in ("ttft", "tpot", "itl"))
    assert first["off_graph_decode_steps"] == 0
    once = [*options, "--rounds", "1", "--ab", "num_speculative_tokens=0,2"]
    for line in bench.lines(*once):
        assert line["light_tokens_per_s"] == pytest.approx(line["tokens_per_s"] * line["vs_light"])
    text = bench.text(*once)
    assert "num_speculative_tokens = 2" in text
    assert "same_tokens" in text


def test_bench_generate_takes_variants_of_several_fields_prompt_by_prompt(
    tool: Any, small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = tool("bench_generate")
    options = [*small, "--num-prompts", "3", "--concurrency", "1", "--max-tokens", "6", "--rounds", "2", "--turn", "1"]
    turns, serve = list[int](), bench.module.serve

    def counted(engine: Any, prompts: list[list[int]], *rest: Any) -> Any:
        turns.append(len(prompts))
        return serve(engine, prompts, *rest)

    monkeypatch.setattr(bench.module, "serve", counted)
    plain, adaptive = bench.lines(
        *options, "--variant", "num_speculative_tokens=0",
        "--variant", "num_speculative_tokens=2", "adaptive_speculation=true",
    )  # fmt: skip
    assert turns == [1] * (2 + 2 * 2 * 3)  # two to warm up
    assert (plain["config"]["num_speculative_tokens"], adaptive["config"]["adaptive_speculation"]) == (0, True)
    assert adaptive["same_tokens"]
    assert plain["ratio_total"] == 1.0
    assert adaptive["ratio_min"] <= adaptive["ratio_total"] <= adaptive["ratio_max"]


FAKE_VLLM = """
import os, sys
from types import SimpleNamespace as Any
print("vLLM prints on stdout")
__version__ = "fake"
drafts = 0

class SamplingParams:
    def __init__(self, temperature, max_tokens):
        assert temperature == 0.0
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, **options):
        if options["max_num_seqs"] > 2:
            raise MemoryError("no room")
        assert os.environ["OMP_NUM_THREADS"] == "1" and options["enable_prefix_caching"] is False
        self.k = options.get("speculative_config", {}).get("num_speculative_tokens", 0)

    def get_metrics(self):
        names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
        return [Any(name=name, value=drafts * (i + 1)) for i, name in enumerate(names)]

    def generate(self, prompts, params, use_tqdm):
        global drafts
        drafts += self.k
        kept = Any(scheduled_ts=1.0, first_token_ts=1.5, last_token_ts=2.5)
        ids = [5 + i for i in range(params.max_tokens)]
        return [Any(outputs=[Any(token_ids=ids)], metrics=kept) for _ in prompts]
"""


@pytest.fixture
def fake_python(tmp_path: Path) -> str:
    """A Python in which `vllm` is the class above."""
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_peers_run_in_processes_of_their_own(tool: Any, small: list[str], fake_python: str) -> None:
    options = [*small, "--peers", "vllm", "--vllm-python", fake_python, "--num-prompts", "2", "--max-tokens", "5"]
    plain, drafted = tool("compare_peers").lines(*options, "--rounds", "2", "--threads", "1")
    assert (plain["config"]["peer"], drafted["config"]["peer"]) == ("vllm", "vllm, k = 3 n-grams")
    assert (plain["config"]["versions"], plain["dtype"]) == ("vllm fake", "float32")
    assert (plain["same"], plain["ratio"], plain["mean_acceptance_length"]) == ("4/4", 1.0, 1.0)
    assert drafted["mean_acceptance_length"] == 3.0
    assert (drafted["ttft_p50_ms"], drafted["tpot_p50_ms"]) == (500.0, 250.0)
    assert drafted["token_vs_plain_light"] > 0


def test_a_peer_that_fails_is_named_with_the_cause(tool: Any, small: list[str], fake_python: str) -> None:
    options = [*small, "--peers", "vllm", "--threads", "1", "--concurrency", "3"]
    command = tool("compare_peers")
    with pytest.raises(SystemExit, match="compare_peers: vllm failed: MemoryError: no room"):
        command.text(*options, "--vllm-python", fake_python)
    with pytest.raises(SystemExit, match="vllm failed: ModuleNotFoundError: No module named 'vllm'"):
        command.text(*options, "--vllm-python", sys.executable)
    with pytest.raises(SystemExit, match='cannot start "/no/python"'):
        command.text(*options, "--vllm-python", "/no/python")
    with pytest.raises(SystemExit, match="vllm needs --vllm-python"):
        command.text(*options)


def test_peers_give_equal_tokens_and_what_they_measured(tool: Any, tiny_checkpoint: Path) -> None:
    """transformers plain, in batches and with prompt lookup, and graphspec: the same protocol, the same greedy text."""
    first = {"model": str(tiny_checkpoint), "dtype": "float32", "max_model_len": 128, "num_draft": 0}
    request = {"prompts": [[5, 6, 7, 5, 6], [9, 8, 7, 6, 5, 4, 3]], "max_tokens": 12}
    found = []
    for name, own in (
        ("peer_transformers", {"concurrency": 2}),
        ("peer_transformers", {"concurrency": 1, "num_draft": 3}),
        ("peer_graphspec", {"concurrency": 2, "num_draft": 3}),
    ):
        run, versions = tool(name).module.start({**first, **own})
        assert "torch" in versions
        found.append(run(request))
    for answer in found:
        assert answer["token_ids"] == found[0]["token_ids"]
        assert len(answer["ttft"]) == len(answer["tpot"]) == 2
        assert answer["seconds"] > 0
    assert found[0]["mean_acceptance_length"] == 1.0
    assert found[1]["mean_acceptance_length"] >= 1.0


def test_starts_are_taken_apart_in_processes_of_their_own(tool: Any, small: list[str]) -> None:
    """The model and the user cache are the child's; its phases add up to the whole."""
    options = [*small, "--modes", "graph", "eager", "--rounds", "1", "--max-model-len", "64"]
    lines = tool("bench_startup").lines(*options)
    assert [(line["config"]["mode"], line["config"]["cache"]) for line in lines] == [
        ("graph", "cold"), ("graph", "warm"), ("eager", "cold"), ("eager", "warm"),
    ]  # fmt: skip
    phases = ("import_s", "load_s", "engine_s", "first_token_s", "first_step_s")
    for line in lines:
        assert all(line[name] > 0 for name in (*phases, "second_ttft_ms"))
        assert sum(line[name] for name in phases) == pytest.approx(line["total_s"])
        seconds = {"cold": 60, "warm": 10}[line["config"]["cache"]]
        assert line["vs_bound"] == pytest.approx(line["total_s"] / seconds)
        kv = 2 * 3 * 2 * 12 * 16 * (4 + 1) * 4  # K and V x layers x heads x size x page x pages, scratch too x bytes
        assert line["kv_mb"] == pytest.approx(kv / 1e6)
        assert line["weight_mb"] == pytest.approx(sum(p.nbytes for p in tiny_of(small[1]).parameters()) / 1e6)
        bound = 2.2 * line["weight_mb"] + line["kv_mb"] + 1000
        assert line["peak_vs_bound"] == pytest.approx(line["peak_mb"] / bound)


def tiny_of(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("bench_generate", ["--ab", "no_such_field=1"], "depth=0,1"),
        ("bench_generate", ["--ab", "depth=99"], "depth must be in 0 .. 8"),
        ("bench_generate", ["--variant", "depth=1", "k=3"], "takes a field of EngineConfig and its value"),
        ("bench_generate", ["--turn", "-1"], "--turn takes a number of prompts, not -1"),
        ("bench_generate", ["--prompts-file", "nowhere.txt"], "cannot read the prompts file"),
        ("bench_step", ["--context", "5000"], "exceeds the model's limit"),
        ("bench_attention", ["--lengths", "3"], "lengths must lie between"),
        ("bench_attention", ["--backends", "abacus"], 'unknown attention backend "abacus"'),
        ("compare_peers", ["--prompts-file", "nowhere.txt"], "cannot read the prompts file"),
        ("bench_startup", ["--model", str(TOOLS)], "the engine failed: ValueError: .* is no model folder"),
        ("speed_of_light", ["--device", "abacus"], 'unknown device "abacus"'),
        ("speed_of_light", ["--plot", "nowhere/plot.png"], "a folder that exists"),
    ],
)
def test_bad_arguments_give_one_sentence(
    tool: Any, small: list[str], name: str, arguments: list[str], sentence: str
) -> None:
    model = [] if name == "bench_attention" else small
    with pytest.raises(SystemExit, match=sentence) as caught:
        tool(name).text(*model, *arguments)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{name}: ")


def test_a_plot_is_written(tool: Any, small: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ["--rows", "1", "--lengths", "8", "16", "--repeats", "2", "--num-draft", "0"]
    step = [
        *small,
        "--rows",
        "1",
        "--num-draft",
        "0",
        "--depth",
        "0",
        "--context",
        "8",
        "--steps",
        "2",
        "--rounds",
        "1",
    ]
    for name, arguments in (("bench_attention", options), ("bench_step", step)):
        path = tmp_path / f"{name}.png"
        tool(name).text(*arguments, "--plot", str(path))
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="--plot needs matplotlib"):
        tool("bench_attention").text("--plot", str(tmp_path / "a.png"))
