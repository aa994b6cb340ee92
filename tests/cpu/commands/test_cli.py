"""`graphspec` and `graphspec generate`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers

from graphspec.commands.generate import hindsight
from graphspec.commands.main import main
from graphspec.commands.prompt_files import BUILTIN_PROMPTS, read_prompts
from graphspec.commands.provenance import version_of
from graphspec.records.acceptance import CAUSES, AcceptanceReport, Loss


@pytest.fixture
def base(tiny_checkpoint: Path) -> list[str]:
    return ["generate", "--model", str(tiny_checkpoint), "--max-tokens", "12", "--quiet", "--ignore-eos"]


def test_version_names_everything_that_a_report_should(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert not ended.value.code
    found = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(found) == ["graphspec", "torch", "transformers", "FlashInfer", "device"]
    assert (found["torch"], found["transformers"]) == (torch.__version__, transformers.__version__)
    if not torch.cuda.is_available():
        assert re.fullmatch(r"cpu: .+, \d+ threads", found["device"])


def test_version_says_none_for_what_is_not_installed() -> None:
    assert version_of("no-such-distribution-of-graphspec") == "none"


@pytest.mark.parametrize("group", [[], ["graphs"], ["bench"]])
def test_without_a_subcommand_it_names_what_it_needs(group: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(group)
    assert ended.value.code == 2
    assert "required: COMMAND" in capsys.readouterr().err


def test_statistics_are_the_ones_every_speculation_user_knows(
    base: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*base, "--num_spec_tokens", "2", "--async-scheduling", "--num-prompts", "3"]) == 0
    out = capsys.readouterr().out
    lines = {line[:28].strip(): line[28:].strip() for line in out.splitlines()}
    assert lines["total_num_output_tokens"] == "36"
    assert int(lines["num_draft_tokens"]) == 2 * int(lines["num_drafts"])
    mean = 1 + int(lines["num_accepted_tokens"]) / int(lines["num_drafts"])
    assert lines["mean acceptance length"] == f"{mean:.2f}"
    assert {"acceptance at token 0", "acceptance at token 1", "tokens per second", "host us per step"} <= set(lines)


def test_json_is_one_object_that_reproduces_the_run(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    sampled = [*base, "--json", "--temperature", "0.9", "--prompt", "hello", "--prompt", "world"]
    assert main(sampled) == 0
    first = json.loads(capsys.readouterr().out)
    assert [c["prompt"] for c in first["completions"]] == ["hello", "world"]
    assert first["stats"]["num_output_tokens"] == 24
    seed = str(first["completions"][0]["seed"])
    assert main([*base, "--json", "--temperature", "0.9", "--prompt", "hello", "--seed", seed, "--depth", "0"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["completions"][0]["token_ids"] == first["completions"][0]["token_ids"]


def test_parameters_of_sampling_reach_the_answers(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--temperature", "1", "--seed", "3", "--n", "2", "--logprobs", "1", "--repetition-penalty", "1.4"]
    own += [
        "--presence-penalty",
        "0.5",
        "--frequency-penalty",
        "0.5",
        "--prompt",
        "hello",
        "--prompt",
        "world",
        "--json",
    ]
    assert main([*base, *own]) == 0
    completions = json.loads(capsys.readouterr().out)["completions"]
    assert [(c["prompt"], c["index"]) for c in completions] == [("hello", 0), ("hello", 1), ("world", 0), ("world", 1)]
    for completion in completions:
        assert [next(iter(entry)) for entry in completion["logprobs"]] == [str(t) for t in completion["token_ids"]]
        assert {len(entry) for entry in completion["logprobs"]} <= {1, 2}
    assert main([*base, "--prompt", "hello", "--prompt", "world", "--json", *own[:6]]) == 0
    plain = json.loads(capsys.readouterr().out)["completions"]
    assert [c["token_ids"] for c in plain] != [c["token_ids"] for c in completions]


def test_a_draft_model_is_named_on_the_command_line(
    base: list[str], tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model itself, loaded a second time, drafts nothing but what it says."""
    assert main([*base, "--json", "--prompt", "hello", "--draft-model", str(tiny_checkpoint)]) == 0
    drafted = json.loads(capsys.readouterr().out)
    assert drafted["config"]["draft_model"] == str(tiny_checkpoint)
    assert drafted["stats"]["mean_acceptance_length"] > 3
    assert main([*base, "--json", "--prompt", "hello"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert [c["token_ids"] for c in plain["completions"]] == [c["token_ids"] for c in drafted["completions"]]


def test_acceptance_is_explained_on_request(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    explained = [*base, "--explain-acceptance", "--num-speculative-tokens", "2", "--prompt", "hello hello hello hello"]
    assert main(explained) == 0
    out = capsys.readouterr().out
    shares = {line[:28].strip(): line[28:].split() for line in out.splitlines()}
    assert shares["share of verified drafts"] == ["draft", "0", "draft", "1"]
    for position in (0, 2):
        every = [shares[name][position] for name in ("delivered", *CAUSES)]
        assert sum(map(float, every)) == pytest.approx(100, abs=0.5)
    assert "tokens per step had k been 0: 1.00, 1: " in out
    assert main([*explained, "--json"]) == 0
    acceptance = json.loads(capsys.readouterr().out)["acceptance"]
    assert acceptance["tokens_per_step"][0] == 1.0


def test_hindsight_names_the_best_k_where_costs_are_known() -> None:
    report = AcceptanceReport(10, [5, 4], {}, Loss(0.0, 0.0), [1.0, 1.5, 1.9], [])
    assert list(hindsight(report, ())) == ["tokens per step had k been 0: 1.00, 1: 1.50, 2: 1.90"]
    assert list(hindsight(report, [20.0, 25.0, 38.0]))[1] == (
        "for what a step costs, against k = 0: 0: 1.00x, 1: 1.20x, 2: 1.00x; best: k = 1"
    )


def test_the_pool_is_named_on_the_command_line(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Of two requests that say the same, one after the other, the second is drafted for from the first."""
    one_by_one = [*base, "--max-num-seqs", "1", "--max-tokens", "40", "--json", "--temperature", "1", "--seed", "5"]
    rates = []
    for pool in ("0", "1000"):
        assert main([*one_by_one, "--ngram-pool", pool, "--prompt", "hello", "--prompt", "hello"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["config"]["ngram_pool"] == int(pool)
        rates.append(found["stats"]["draft_acceptance_rate"])
    assert rates[0] < 0.03 < 0.15 < rates[1]


def test_forced_text_is_marked(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*base, "--prompt", "x", "--drafter", "forced", "--forced-num-accepted", "2"]) == 0
    assert "generated text [forced acceptance: not the model's text]:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--num-speculative-tokens", "-3"], "num_speculative_tokens must be in 0 .. 64, got -3"),
        (["--prompts-file", "nowhere.txt"], 'cannot read the prompts file "nowhere.txt"'),
        (["--max-tokens", "0"], "max_tokens must be at least 1"),
        (["--n", "2"], "n > 1 needs temperature > 0"),
        (["--ngram-pool", "-1"], "ngram_pool must be in 0 .. 4194304 entries"),
        (["--model", "."], "no config.json"),
        (["--draft-model", "."], "no config.json"),
        (["--drafter", "draft_model"], 'drafter "draft_model" needs a model'),
        (["--prompt", ""], "the prompt is empty"),
    ],
)
def test_bad_input_is_one_line_on_stderr(
    base: list[str], args: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*base, "--raw", *args]) == 2
    err = capsys.readouterr().err.strip()
    assert err.startswith("graphspec: ")
    assert sentence in err
    assert "\n" not in err


def test_prompt_files_of_both_forms(tmp_path: Path) -> None:
    jsonl = tmp_path / "p.jsonl"
    jsonl.write_text('{"question_id": 81, "turns": ["first", "second"]}\n{"prompt": "third"}\n')
    assert read_prompts(jsonl) == ["first", "third"]
    assert read_prompts(jsonl, 1) == ["first"]
    jsonl.write_text('{"turns": ["a"]}\n{"turns": []}\n')
    with pytest.raises(ValueError, match=r"p.jsonl:2: expected a JSON object"):
        read_prompts(jsonl)
    assert len(read_prompts(BUILTIN_PROMPTS)) == 20
