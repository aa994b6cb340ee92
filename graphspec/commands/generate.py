"""Answer prompts and show what speculation did."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphspec.commands.command import Command
from graphspec.commands.prompt_files import BUILTIN_PROMPTS, read_prompts
from graphspec.engine.engine import Engine
from graphspec.engine.input_processor import Prompt
from graphspec.engine.stats import EngineStats
from graphspec.models.builtin import NAME as BUILTIN_NAME
from graphspec.records.acceptance import AcceptanceReport
from graphspec.records.config import DRAFTERS, EngineConfig
from graphspec.records.outputs import Completion
from graphspec.records.sampling_params import SamplingParams

RULE = "-" * 50


@dataclass(frozen=True)
class Report:
    """One run: completions in the order of the prompts, equally many for each, and what it took. `seconds` leaves out
    loading the model."""

    prompts: list[str]
    completions: list[Completion]
    stats: EngineStats
    seconds: float
    acceptance: AcceptanceReport | None = None
    step_costs: Sequence[float] = ()  # see `Engine.step_costs`

    @property
    def tokens_per_second(self) -> float:
        return self.stats.num_output_tokens / self.seconds

    def answers(self) -> Iterator[tuple[str, Completion]]:
        each = len(self.completions) // len(self.prompts)
        return ((self.prompts[i // each], completion) for i, completion in enumerate(self.completions))


def run(
    model: str,
    prompts: list[str],
    params: SamplingParams,
    config: EngineConfig,
    *,
    chat: bool = True,
    progress: bool = True,
) -> Report:
    """Generate for `prompts`, as chat messages if `chat` and the tokenizer has a template."""
    with Engine.from_pretrained(model, config) as engine:
        as_chat = chat and engine.has_chat_template
        given: list[Prompt] = [[{"role": "user", "content": p}] if as_chat else p for p in prompts]
        started = time.perf_counter()
        completions = engine.generate(given, params, progress=progress)
        seconds = time.perf_counter() - started
        explained = engine.explain_acceptance() if engine.config.explains_acceptance else None
        return Report(prompts, completions, engine.stats(), seconds, explained, engine.step_costs())


def summary(report: Report) -> list[tuple[str, str]]:
    """Name and value of every line of the closing statistics."""
    stats = report.stats
    lines = [
        ("total_num_output_tokens", f"{stats.num_output_tokens}"),
        ("num_drafts", f"{stats.num_drafts}"),
        ("num_draft_tokens", f"{stats.num_draft_tokens}"),
        ("num_accepted_tokens", f"{stats.num_accepted_tokens}"),
        ("draft acceptance rate", f"{stats.draft_acceptance_rate:.2f}"),
        ("mean acceptance length", f"{stats.mean_acceptance_length:.2f}"),
    ]
    lines += [(f"acceptance at token {i}", f"{rate:.2f}") for i, rate in enumerate(stats.acceptance_rates)]
    if len(stats.num_steps_per_k) > 1:
        lines += [(f"decode steps with k = {k}", f"{count}") for k, count in stats.num_steps_per_k.items()]
    return [
        *lines,
        ("tokens per second", f"{report.tokens_per_second:.1f}"),
        ("steps", f"{stats.num_steps}"),
        ("device ms per step", f"{stats.device_ms_per_step:.1f}"),
        ("host us per step", f"{stats.host_us_per_step:.0f}"),
        ("device waited for the host", f"{100 * stats.device_idle_share:.1f} %"),
        ("steps off graph", f"{stats.off_graph_decode_steps}"),
        ("graphs, seconds to capture", f"{stats.num_graphs}, {stats.capture_seconds:.1f}"),
        ("wasted positions", f"{stats.wasted_positions}"),
        ("preemptions", f"{stats.num_preemptions}"),
    ]


def explanation(report: AcceptanceReport, step_costs: Sequence[float] = ()) -> Iterator[str]:
    """Lines that say where drafts were lost, and what another k would have given, see `hindsight`."""
    positions = range(len(report.delivered))
    yield f"{'share of verified drafts':<28}" + "".join(f"{f'draft {i}':>10}" for i in positions)
    for name, counts in [("delivered", report.delivered), *report.lost.items()]:
        yield f"{name:<28}" + "".join(f"{100 * n / max(1, report.num_drafts):>8.1f} %" for n in counts)
    yield f"drafts that differ: mean rank {report.differs.mean_rank:.1f}, less likely by {report.differs.mean_gap:.2f}"
    yield from hindsight(report, step_costs)
    yield from report.alarms


def hindsight(report: AcceptanceReport, step_costs: Sequence[float]) -> Iterator[str]:
    """Tokens that a row would have got per step at every k up to the one in use, and, where `step_costs` says what a
    step costs at k = 0, 1, ... (any unit), which k gave most for its cost."""
    yield "tokens per step had k been " + ", ".join(f"{k}: {t:.2f}" for k, t in enumerate(report.tokens_per_step))
    if step_costs:
        plain = step_costs[0]  # a step without drafts gives one token for this
        gains = [t * plain / c for t, c in zip(report.tokens_per_step, step_costs, strict=False)]
        per_cost = ", ".join(f"{k}: {gain:.2f}x" for k, gain in enumerate(gains))
        yield f"for what a step costs, against k = 0: {per_cost}; best: k = {report.best_k(step_costs)}"


def run_command(args: argparse.Namespace) -> int:
    config = EngineConfig(**{f.name: getattr(args, f.name) for f in dataclasses.fields(EngineConfig) if f.name in args})
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        n=args.n,
        logprobs=args.logprobs,
        ignore_eos=args.ignore_eos,
        seed=args.seed if args.temperature else None,
    )
    prompts = args.prompt or read_prompts(args.prompts_file, args.num_prompts)
    report = run(args.model, prompts, params, config, chat=not args.raw, progress=not args.quiet)
    if args.json:
        print(json.dumps(_as_json(report, args.model, config)))
        return 0
    if args.print_output or args.prompt:
        for prompt, completion in report.answers():
            note = " [forced acceptance: not the model's text]" if completion.synthetic else ""
            print(f"{RULE}\nprompt: {prompt}\ngenerated text{note}: {completion.text}")
    print(RULE)
    for name, value in summary(report):
        print(f"{name:<28}{value:>12}")
    if report.acceptance is not None:
        print(RULE, *explanation(report.acceptance, report.step_costs), sep="\n")
    return 0


def _as_json(report: Report, model: str, config: EngineConfig) -> dict[str, Any]:
    return {
        "model": model,
        "config": dataclasses.asdict(config),
        "seconds": report.seconds,
        "tokens_per_second": report.tokens_per_second,
        "stats": dataclasses.asdict(report.stats),
        "acceptance": None if report.acceptance is None else dataclasses.asdict(report.acceptance),
        "completions": [
            {"prompt": prompt, **dataclasses.asdict(completion)} for prompt, completion in report.answers()
        ],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `graphspec generate` takes."""
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    defaults = EngineConfig()
    add = parser.add_argument
    add("--model", default=BUILTIN_NAME, help="built-in name, local Hugging Face folder, or hub id")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", action="append", help="a prompt; may be given several times")
    source.add_argument("--prompts-file", type=Path, default=BUILTIN_PROMPTS, help="text lines or MT-bench jsonl")
    add("--num-prompts", type=int, help="take only the first prompts of the file")
    add("--raw", action="store_true", help="do not wrap prompts in the chat template")
    add("--max-tokens", type=int, default=128, help="most tokens per answer")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--top-k", type=int, default=0, help="0 is off")
    add("--top-p", type=float, default=1.0, help="1 is off")
    add("--min-p", type=float, default=0.0, help="0 is off")
    add("--repetition-penalty", type=float, default=1.0, help="on tokens of prompt and answer; 1 is off")
    add("--presence-penalty", type=float, default=0.0, help="on tokens of the answer; 0 is off")
    add("--frequency-penalty", type=float, default=0.0, help="on tokens of the answer, per occurrence; 0 is off")
    add("--n", type=int, default=1, help="answers per prompt")
    add("--logprobs", type=int, metavar="N", help="with --json: log-probabilities of tokens and of the N best")
    add("--ignore-eos", action="store_true", help="always generate --max-tokens tokens")
    add("--seed", type=int, help="makes sampling reproducible: the same for every prompt, and for drawing seeds")
    add("--num-speculative-tokens", "--num_spec_tokens", "--num-spec-tokens", type=int, metavar="K",
        default=defaults.num_speculative_tokens, help="drafts per request and step; 0 is off")  # fmt: skip
    add("--adaptive-speculation", action="store_true", help="choose k anew for every step, up to the number above")
    add("--drafter", choices=DRAFTERS, default=defaults.drafter)
    add("--draft-model", help="drafts with this causal LM of the same tokenizer: a name as for --model")
    add("--draft-shares-noise", action=argparse.BooleanOptionalAction, default=defaults.draft_shares_noise,
        help="the draft model draws with the noise and the processors of the model")  # fmt: skip
    add("--ngram-pool", type=int, metavar="N", default=defaults.ngram_pool,
        help="entries of a table of n-grams that all requests share; 0 is off")  # fmt: skip
    add(
        "--explain-acceptance",
        action="store_true",
        help="show why drafts were rejected, and what another k gives; "
        "with --adaptive-speculation also which one was best by measured step times",
    )
    add("--forced-num-accepted", type=int, default=0, help="with --drafter forced: drafts accepted per step")
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--depth", type=int, default=defaults.depth, help="steps the scheduler runs ahead; 0 is sync")
    depth.add_argument("--async-scheduling", dest="depth", action="store_const", const=1, help="the same as --depth 1")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    add("--device", default="auto")
    add(
        "--attention-backend",
        default="auto",
        help="cpu, reference, flashinfer_xqa, flashinfer_fa2 or flashinfer_fa2_split",
    )
    add("--attention-table", help="JSON file of measurements that --attention-backend auto follows")
    add("--enforce-eager", action="store_true", help="no captured graphs")
    add("--compile", action=argparse.BooleanOptionalAction, default=None, help="torch.compile the decode forward")
    add("--pack-weights", action=argparse.BooleanOptionalAction, default=None,
        help="on the CPU: read weights in half precision where that loses nothing")  # fmt: skip
    add("--batch-invariant", action="store_true", help="on the CPU: bit-equal logits whatever else is in the batch")
    add("--max-num-seqs", type=int, default=defaults.max_num_seqs, help="requests that run at once")
    add("--max-model-len", type=int, help="most tokens of a request, prompt and answer; default: the model's limit")
    add("--num-pages", type=int, help="KV pages; default: what the memory allows")
    add("--print-output", action="store_true", help="print every answer")
    add("--json", action="store_true", help="print one JSON object instead")
    add("--quiet", action="store_true", help="no progress bar")


COMMAND = Command(__doc__, add_arguments, run_command)
