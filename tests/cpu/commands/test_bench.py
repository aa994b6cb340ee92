"""`graphspec bench`: the benchmarks run, on a tiny model, and their numbers mean what they say."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_model

from graphspec import Engine, EngineConfig, SamplingParams
from graphspec.commands import provenance
from graphspec.commands.bench import attention, generate, peer, serving_load, speed_of_light, startup
from graphspec.commands.bench.decode_load import step_until_all_decode
from graphspec.commands.bench.speed_of_light import ModelWork, Rates, StepBound
from graphspec.commands.bench.step_parts import DeviceClock, HostClock, parts_between
from graphspec.commands.main import main
from graphspec.models.packed_linears import has_fbgemm
from graphspec.records.launch import DecodeRows, RowResults, StepPlan, StepResult

Lines = list[dict[str, Any]]


class Bench:
    """`graphspec bench`, and what it prints."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def text(self, *arguments: str) -> str:
        assert main(["bench", *arguments]) == 0
        return self._capsys.readouterr().out

    def lines(self, *arguments: str) -> Lines:
        return [json.loads(line) for line in self.text(*arguments, "--json").splitlines()]

    def sentence(self, *arguments: str) -> str:
        """What it says where it cannot work."""
        assert main(["bench", *arguments]) == 2
        return self._capsys.readouterr().err.strip()


@pytest.fixture
def bench(known_rates: None, capsys: pytest.CaptureFixture[str]) -> Bench:
    return Bench(capsys)


@pytest.fixture
def small(tiny_checkpoint: Path) -> list[str]:
    return ["--model", str(tiny_checkpoint)]


STEP = ["--rows", "2", "--context", "16", "--steps", "4", "--rounds", "1"]
DEVICE_PARTS = ["inputs", "lookup + launch", "correct", "forward", "verify", "update", "draft", "output"]
HOST_PARTS = {"schedule", "staging", "submit", "wait for the device", "read-back", "commit", "detokenise", "other"}


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_a_step_is_taken_apart(bench: Bench, small: list[str], mode: str) -> None:
    lines = bench.lines("step", *small, *STEP, "--num-draft", "2", "--depth", "0", "1", "--modes", mode)
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


def test_growth_with_the_context_stands_beside_that_of_kv(bench: Bench, small: list[str]) -> None:
    steps = [*small, *STEP, "--num-draft", "0", "2", "--depth", "0"]
    steps[steps.index("16") : steps.index("16") + 1] = ["16", "48"]
    lines = bench.lines("step", *steps)
    assert [(line["config"]["context"], line["config"]["num_draft"]) for line in lines] == [
        (16, 0), (16, 2), (48, 0), (48, 2)
    ]  # fmt: skip
    assert [line["growth_ms"] for line in lines[:2]] == [None, None]
    for line, shorter in zip(lines[2:], lines[:2], strict=True):
        assert line["growth_ms"] == pytest.approx(line["device_ms"] - shorter["device_ms"], abs=1e-4)  # one round
        assert line["growth_kv_ms"] == pytest.approx(lines[2]["growth_kv_ms"])
        assert line["growth_kv_ms"] > 0


def test_parts_of_a_step_add_up() -> None:
    parts = parts_between([("a", 2.0), ("b", 5.0), ("a", 6.0)], 1.0, 10.0)
    assert parts == {"inputs": 1.0, "a": 7.0, "b": 1.0}


def test_the_clocks_account_for_the_whole_step() -> None:
    """Device parts add up to the time between the ends of the launch, host parts to that of the call, nothing twice;
    tokens are those of the step that is not taken apart, and the engine is as before afterwards."""

    def tokens(apart: bool) -> list[int]:
        found: list[int] = []
        with Engine(tiny_model(), config=EngineConfig(depth=0, max_model_len=256)) as engine:
            device, host = DeviceClock(engine), HostClock(engine)
            before = engine._runner.decode_step._iteration
            engine.add_request([5, 6, 7, 5, 6], SamplingParams(max_tokens=60, ignore_eos=True))
            step_until_all_decode(engine)
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


def test_what_a_step_must_move_is_counted_by_hand() -> None:
    """The tiny model: 3 layers, hidden 48, 4 query and 2 KV heads of 12, intermediate 96, 211 tokens, head untied."""
    work = ModelWork.of(tiny_model())
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
    packed = ModelWork.of(model, {id(up)})
    assert (packed.weights, packed.packed) == (4 * (matrices + norms) - 2 * 48 * 96, 2 * 48 * 96)

    windowed = ModelWork.of(tiny_model("mistral")).step(1, 1, 100)
    assert windowed.kv_bytes == 3 * (24 + 2) * 2 * 2 * 12 * 4
    rates = Rates(bytes_per_s=1e6, operations_per_s=1e12)
    assert rates.seconds(step) == step.num_bytes / 1e6
    assert Rates(1e12, 1e6).seconds(step) == step.operations / 1e6


def test_the_bound_of_a_launch_follows_its_rows_and_true_lengths() -> None:
    bound = StepBound(Rates(1e9, 1e15), ModelWork.of(tiny_model()))
    ints = np.zeros(2, np.int64)
    rows = DecodeRows(ints, ints, ints, np.zeros((2, 4), np.int32), 3, "greedy")
    result = StepResult(None, RowResults(ints, ints, np.array([10, 30]), ints, np.zeros((2, 4), np.int64)))
    plan = StepPlan(0, (), None, rows, num_draft_next=3)
    assert bound.launch_seconds(plan, result) == bound.seconds(2, 3, 20.0)
    ratios = bound.ratios(2 * bound.seconds(2, 3, 20.0), 2, 3, 20.0, emitted=4.0)
    assert ratios["vs_light"] == 2.0
    assert ratios["token_vs_plain_light"] < 2.0  # the weights of one step served four tokens


@pytest.mark.skipif(not has_fbgemm(), reason="needs FBGEMM and AVX2")
def test_the_bound_counts_what_an_engine_reads() -> None:
    """Weights that half precision holds are read packed: all of this model but the ones of its norms."""
    model = tiny_model()
    for parameter in model.parameters():
        parameter.copy_(parameter.half())
    matrices = ModelWork.of(model).matrix_elements
    for pack, item in ((None, 2), (False, 4)):
        with Engine(model, config=EngineConfig(pack_weights=pack, max_model_len=64)) as engine:
            bound = StepBound.of(Rates(1e9, 1e15), engine)
            norms = 4 * (3 * 2 * 48 + 48)
            assert bound.model.weights == item * matrices + norms
            assert bound.model.packed == (2 * matrices if item == 2 else 0)
            assert bound.seconds(1, 0, 8) > bound.model.weights / 1e9
            assert f"{bound.model.packed / 1e6:.1f} MB of packed" in bound.counted


def test_rates_are_measured() -> None:
    assert speed_of_light.read_bandwidth(torch.device("cpu"), 1 << 20) > 1e6
    assert speed_of_light.matrix_rate(torch.device("cpu"), torch.float32) > 1e6


def test_a_line_holds_the_options_of_its_command_and_no_others(bench: Bench) -> None:
    (line,) = bench.lines("attention", "--rows", "1", "--lengths", "8", "--repeats", "2", "--num-draft", "0")
    parser = argparse.ArgumentParser()
    attention.add_arguments(parser)
    of_the_line = {"backend", "length"}
    assert set(line["config"]) == set(vars(parser.parse_args([]))) - {"plot"} | of_the_line


def test_attention_cost_follows_the_true_length(bench: Bench, tmp_path: Path) -> None:
    """Block tables for 16,384 tokens; what a short row costs is far from what a long one costs."""
    options = ["--lengths", "32", "8192", "--capacity", "16384", "--rows", "2", "--repeats", "3", "--num-draft", "3"]
    lines = bench.lines("attention", *options, "--backends", "reference", "auto")
    assert [line["config"]["length"] for line in lines] == [32, 32, 8192, 8192]
    assert [line["config"]["backend"] for line in lines] == ["reference", "auto"] * 2
    assert lines[2]["us"] > 5 * lines[0]["us"]
    assert all(line["vs_light"] == pytest.approx(line["us"] / line["light_us"]) for line in lines)
    assert lines[2]["light_us"] == pytest.approx(1e6 * 4 * 9 * 64 * 2 * 4 * (8192 - 1.5) / 1e9)


def test_bench_generate_runs_variants_side_by_side(bench: Bench, small: list[str]) -> None:
    options = [*small, "--num-prompts", "4", "--concurrency", "2", "--max-tokens", "8", "--rounds", "2"]
    first, second = bench.lines("generate", *options, "--ab", "depth=0,1")
    assert (first["config"]["depth"], second["config"]["depth"]) == (0, 1)
    assert (first["ratio"], first["same_tokens"], second["same_tokens"]) == (1.0, True, True)
    assert first["mean_acceptance_length"] == second["mean_acceptance_length"]
    assert all(first[f"{name}_p50_ms"] > 0 for name in ("ttft", "tpot", "itl"))
    assert first["off_graph_decode_steps"] == 0
    once = [*options, "--rounds", "1", "--ab", "num_speculative_tokens=0,2"]
    for line in bench.lines("generate", *once):
        assert line["light_tokens_per_s"] == pytest.approx(line["tokens_per_s"] * line["vs_light"])
    text = bench.text("generate", *once)
    assert "num_speculative_tokens = 2" in text
    assert "same_tokens" in text


def test_bench_generate_takes_variants_of_several_fields_prompt_by_prompt(
    bench: Bench, small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*small, "--num-prompts", "3", "--concurrency", "1", "--max-tokens", "6", "--rounds", "2", "--turn", "1"]
    turns, serve = list[int](), serving_load.serve

    def counted(engine: Any, prompts: list[list[int]], *rest: Any) -> Any:
        turns.append(len(prompts))
        return serve(engine, prompts, *rest)

    monkeypatch.setattr(generate, "serve", counted)
    plain, adaptive = bench.lines(
        "generate", *options, "--variant", "num_speculative_tokens=0",
        "--variant", "num_speculative_tokens=2", "adaptive_speculation=true",
    )  # fmt: skip
    assert turns == [1] * (2 + 2 * 2 * 3)  # two to warm up
    assert (plain["config"]["num_speculative_tokens"], adaptive["config"]["adaptive_speculation"]) == (0, True)
    assert adaptive["same_tokens"]
    assert plain["ratio_total"] == 1.0
    assert adaptive["ratio_min"] <= adaptive["ratio_total"] <= adaptive["ratio_max"]


def test_starts_are_taken_apart_in_processes_of_their_own(bench: Bench, small: list[str]) -> None:
    """The model and the user cache are the child's; its phases add up to the whole."""
    options = [*small, "--modes", "graph", "eager", "--rounds", "1", "--max-model-len", "64"]
    lines = bench.lines("startup", *options)
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


def test_a_start_runs_the_code_that_measures_it(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called where another `graphspec` lies, which the child must not take for this one."""
    (tmp_path / "graphspec").mkdir()
    (tmp_path / "graphspec" / "__init__.py").write_text("raise SystemExit('another one')")
    monkeypatch.chdir(tmp_path)
    found = startup.measure({"model": small[1], "prompt": "hello", "config": {"max_model_len": 64}}, tmp_path)
    assert found["total_s"] == pytest.approx(sum(found["phases"].values()))


def test_a_peer_that_is_no_answer_is_named_with_what_it_printed(tmp_path: Path) -> None:
    """A peer is a file with `start`; what it prints while it is imported is no answer, and its error has a name."""
    good, bad = tmp_path / "peer_good.py", tmp_path / "peer_bad.py"
    good.write_text(
        "print('hello')\ndef start(first): return (lambda request: {'twice': 2 * request['n']}), first['v']"
    )
    bad.write_text("print('hello')\nraise OSError('no room')")
    with peer.Peer.of_file("good", sys.executable, good, {}) as running:
        assert running.ask({"v": "1.0"}) == {"versions": "1.0"}
        assert running.ask({"n": 4}) == {"twice": 8}
        with pytest.raises(ValueError, match="good failed: KeyError: 'n'"):
            running.ask({})
    with peer.Peer.of_file("bad", sys.executable, bad, {}) as running, pytest.raises(ValueError, match="no room"):
        running.ask({})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", "--ab", "no_such_field=1"], "depth=0,1"),
        (["generate", "--ab", "depth=99"], "depth must be in 0 .. 8"),
        (["generate", "--variant", "depth=1", "k=3"], "takes a field of EngineConfig and its value"),
        (["generate", "--turn", "-1"], "--turn takes a number of prompts, not -1"),
        (["generate", "--prompts-file", "nowhere.txt"], "cannot read the prompts file"),
        (["step", "--context", "5000"], "exceeds the model's limit"),
        (["step", "--device", "abacus"], 'unknown device "abacus"'),
        (["step", "--plot", "nowhere/plot.png"], "a folder that exists"),
        (["attention", "--lengths", "3"], "lengths must lie between"),
        (["attention", "--backends", "abacus"], 'unknown attention backend "abacus"'),
        (["startup", "--model", str(Path(__file__).parent)], "is no model folder"),
    ],
)
def test_bad_arguments_give_one_sentence(bench: Bench, small: list[str], arguments: list[str], sentence: str) -> None:
    command, *options = arguments
    said = bench.sentence(command, *([] if command == "attention" or "--model" in options else small), *options)
    assert said.startswith("graphspec: ")
    assert sentence in said
    assert "\n" not in said


def test_a_plot_is_written(bench: Bench, small: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    attention = ["--rows", "1", "--lengths", "8", "16", "--repeats", "2", "--num-draft", "0"]
    step = ["--rows", "1", "--num-draft", "0", "--depth", "0", "--context", "8", "--steps", "2", "--rounds", "1"]
    for name, arguments in (("attention", attention), ("step", [*small, *step])):
        path = tmp_path / f"{name}.png"
        bench.text(name, *arguments, "--plot", str(path))
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "--plot needs matplotlib" in bench.sentence("attention", "--plot", str(tmp_path / "a.png"))


def test_the_scheduler_benchmark_prints_the_agreed_line(bench: Bench) -> None:
    (line,) = bench.lines("scheduler", "--requests", "4", "--num-draft", "3", "--steps", "20")
    assert line["host_us_per_request"] > 0
    assert {"commit", "device", "config", "schedule_us", "staging_us", "commit_us"} <= set(line)


def test_a_line_names_the_commit_of_a_checkout_and_else_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed copy inside somebody's checkout is not of that commit: it is no file of it."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
    code = tmp_path / "provenance.py"
    code.write_text("")
    monkeypatch.setattr(provenance, "__file__", str(code))
    monkeypatch.setattr(provenance, "version_of", lambda _: "1.2.3")
    assert provenance.commit() == "1.2.3"
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    assert provenance.commit() == "1.2.3"
    subprocess.run([*git, "add", "provenance.py"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "second"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    assert head.startswith(provenance.commit())
    code.write_text("changed")
    assert provenance.commit().endswith("+")
