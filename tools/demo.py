"""The main job, end to end: real prompts on the built-in model with drafts and the scheduler one step ahead, then the
same prompts synchronously, side by side."""

from __future__ import annotations

import argparse
import textwrap

import transformers

from graphspec import EngineConfig, SamplingParams
from graphspec.commands.generate import RULE, Report, run, summary
from graphspec.commands.prompt_files import BUILTIN_PROMPTS, read_prompts
from graphspec.models.builtin import NAME, builtin_model_path

SHOWN = 3  # answers printed in full


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    print(f"{NAME}: {builtin_model_path()}")
    prompts = read_prompts(BUILTIN_PROMPTS)
    params = SamplingParams(max_tokens=args.max_tokens)
    reports = {}
    for depth in (1, 0):
        print(f"\n{len(prompts)} prompts, k = {args.num_speculative_tokens}, depth = {depth}", flush=True)
        config = EngineConfig(depth=depth, num_speculative_tokens=args.num_speculative_tokens, dtype="float32")
        reports[depth] = run(NAME, prompts, params, config)
    show_answers(reports[1])
    show_side_by_side(reports[1], reports[0])


def show_answers(report: Report) -> None:
    for prompt, completion in list(zip(report.prompts, report.completions, strict=True))[:SHOWN]:
        print(RULE)
        print(textwrap.fill(prompt, 100, initial_indent="prompt: "))
        print(f"answer: {completion.text}")
    print(f"{RULE}\n({len(report.prompts) - SHOWN} more answers: graphspec generate --print-output)\n")


def show_side_by_side(ahead: Report, synchronous: Report) -> None:
    print(f"{'':<28}{'depth 1':>12}{'depth 0':>12}")
    for (name, a), (_, b) in zip(summary(ahead), summary(synchronous), strict=True):
        print(f"{name:<28}{a:>12}{b:>12}")
    same = sum(a.token_ids == b.token_ids for a, b in zip(ahead.completions, synchronous.completions, strict=True))
    print(f"{'same answers':<28}{f'{same} of {len(ahead.completions)}':>12}")


if __name__ == "__main__":
    main()
