"""Take a decode step apart, swept over rows, k, context, depth, sampler and how it is run.

    graphspec bench step --rows 1 8 --num-draft 0 5 --depth 0 1
    graphspec bench step --modes graph eager compiled --context 128 2048 --plot step.png
    graphspec bench step --rows 1 8 --num-draft 0 5 --samplers greedy plain bounded sorted
    graphspec bench step --overhead --max-num-seqs 64

Steps hold decode rows only. Drafts are made as by n-grams and a fixed number of them is accepted (`--accepted`, by
default half), which separates the cost of the engine from the quality of a drafter. All variants live in one process on
the same weights. Those with the same rows, which are compared, take turns in every round, so drift of the machine meets
all of them alike; then their lines are printed, and the next rows follow.

    device ms     device computing one launch: events on CUDA, the stream's own timestamps on the CPU
    x first       the same, against the first variant with these rows and this context, median over rounds
    growth ms     what it takes longer than the same at the first context, median over rounds
    KV ms         the time in which the device reads as many bytes as it has more of K and V then
    stretch       device ms against depth 0: on the CPU host and device share the cores and the interpreter
    idle %        share of the device's time spent waiting for the host
    host us       host work of one `Engine.step`, the wait for the device left out
    x light         device ms over the bound: the time to read what the step must read, or to multiply what it must
    x plain light   time per emitted token over the bound of a token without speculation

Below, where the time goes: median / p90 / p99 of every part, measured in steps of their own, in its graph. The
line "total of the parts" beside "the real step" says what taking it apart costs. Both are of depth 0 for the device.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from graphspec.commands.bench.decode_load import Turn, decoding, prompts_of, set_depth, timed_steps, tokens_needed
from graphspec.commands.bench.options import add_common, load, load_tokenizer, on_same_weights, settle
from graphspec.commands.bench.output import Output, percentile, progress, side_by_side
from graphspec.commands.bench.plots import plot_bars
from graphspec.commands.bench.replay_overhead import show_overhead
from graphspec.commands.bench.speed_of_light import StepBound, measured_rates
from graphspec.commands.bench.step_parts import DeviceClock, HostClock, Parts
from graphspec.commands.command import Command
from graphspec.commands.sampler_kinds import params_for
from graphspec.engine.engine import Engine
from graphspec.records.config import EngineConfig
from graphspec.sampling.keyed_sampling import SAMPLERS

MODES: dict[str, dict[str, Any]] = {
    "graph": {"compile": False},
    "eager": {"enforce_eager": True, "compile": False},
    "compiled": {"compile": True},
}

COLUMNS = {
    "mode": "mode", "depth": "depth", "num_draft": "k", "rows": "rows", "context": "context", "sampler": "sampler",
    "device_ms": "device ms", "vs_first": "x first", "growth_ms": "growth ms", "growth_kv_ms": "KV ms",
    "stretch": "stretch", "idle_percent": "idle %",
    "host_us": "host us", "emitted": "emitted", "token_ms": "ms/token", "vs_light": "x light",
    "token_vs_plain_light": "x plain light",
}  # fmt: skip

BESIDE = 4  # variants whose parts are shown side by side


class Case(NamedTuple):
    """One variant of the step."""

    rows: int
    context: int
    mode: str
    num_draft: int
    sampler: str
    depth: int

    @property
    def name(self) -> str:
        return f"{self.mode} d{self.depth} {self.rows}x{1 + self.num_draft} {self.sampler} @{self.context}"


@dataclass
class Series:
    """What the turns of one case gave."""

    turns: list[Turn] = field(default_factory=list)
    host: list[Parts] = field(default_factory=list)
    device: list[Parts] = field(default_factory=list)
    apart_from: list[float] = field(default_factory=list)  # device seconds of real steps at depth 0

    @property
    def busy(self) -> list[float]:
        return [seconds for turn in self.turns for seconds in turn.busy]

    @property
    def medians(self) -> list[float]:
        """Device seconds of a step, per round."""
        return [statistics.median(turn.busy) for turn in self.turns]


class Variant:
    """An engine, and what takes its steps apart."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.device, self.host = engine, DeviceClock(engine), HostClock(engine)
        self.vocab_size = engine._input_processor._facts.vocab_size

    def turn(self, case: Case, steps: int, into: Series) -> None:
        """Time steps as they are, then the host's parts, then, with nothing in flight, the device's."""
        engine, apart = self.engine, max(2, steps // 2)
        set_depth(engine, case.depth)
        params = params_for(case.sampler, max_tokens=_room(case.num_draft, steps), ignore_eos=True, seed=1)
        with decoding(engine, prompts_of(case.rows, case.context, self.vocab_size), params):
            into.turns.append(timed_steps(engine, steps))
            with self.host.attached():
                timed_steps(engine, apart)
            engine.drain()
            set_depth(engine, 0)
            into.apart_from += timed_steps(engine, apart).busy
            with self.device.attached():
                timed_steps(engine, 1 + apart)  # the first one may capture
        into.host += self.host.steps
        into.device += self.device.steps[1:]
        self.host.steps, self.device.steps = [], []


def _room(num_draft: int, steps: int) -> int:
    return tokens_needed(num_draft, 3 * steps + 8)


def cases(args: argparse.Namespace) -> list[Case]:
    swept = (args.rows, args.context, args.modes, args.num_draft, args.samplers, args.depth)
    return [Case(*values) for values in itertools.product(*swept)]


def variants(args: argparse.Namespace, module: Any) -> Iterator[tuple[tuple[str, int], Variant]]:
    """An engine per mode and k: one serves every depth, batch, context and sampler."""
    for mode, k in itertools.product(args.modes, args.num_draft):
        drafts: dict[str, Any] = {"drafter": "none"}
        if k:
            accepted = k // 2 if args.accepted is None else min(k, args.accepted)
            drafts = {"drafter": args.drafter, "forced_num_accepted": accepted if args.drafter == "forced" else 0}
        config = EngineConfig(
            num_speculative_tokens=k, depth=max(args.depth), max_num_seqs=max(args.rows), capture="lazy",
            max_model_len=max(args.context) + _room(k, args.steps), attention_backend=args.attention_backend,
            **drafts, **MODES[mode],
        )  # fmt: skip
        yield (mode, k), Variant(Engine(on_same_weights(module), load_tokenizer(args.model), config))


def measure(args: argparse.Namespace, some: Sequence[Case], made: dict[tuple[str, int], Variant]) -> dict[Case, Series]:
    """Every case takes a turn in every round; the first round, in which graphs are captured, is not kept."""
    found = {case: Series() for case in some}
    with progress((1 + args.rounds) * len(found), "turns") as bar:
        for number in range(1 + args.rounds):
            if number <= 1:
                found = {case: Series() for case in found}
            for case, series in found.items():
                made[case.mode, case.num_draft].turn(case, args.steps, series)
                bar.update()
    return found


def values(case: Case, found: dict[Case, Series], bound: StepBound) -> dict[str, Any]:
    """The fields of one line."""
    series = found[case]
    busy, seconds = series.busy, statistics.median(series.busy)
    first = next(series for other, series in found.items() if other[:2] == case[:2])
    settled = found.get(case._replace(depth=0))
    shorter = case._replace(context=next(iter(found)).context)
    idle, host = ([s for turn in series.turns for s in getattr(turn, name)] for name in ("idle", "host"))
    steps = len(series.turns[0].busy)
    emitted = statistics.fmean(turn.emitted_per_row(case.rows) for turn in series.turns)
    context = case.context + emitted * (2 + case.depth + steps / 2)
    return {
        "device_ms": 1e3 * seconds, "device_ms_p90": 1e3 * percentile(busy, 90),
        "device_ms_p99": 1e3 * percentile(busy, 99), "vs_first": _ratio(series, first),
        **_growth(case, shorter, found, bound),
        "stretch": None if settled is None else _ratio(series, settled),
        "idle_us": 1e6 * statistics.median(idle), "idle_percent": 100 * sum(idle) / (sum(idle) + sum(busy)),
        "host_us": 1e6 * statistics.median(host), "host_us_p99": 1e6 * percentile(host, 99),
        "emitted": emitted, "token_ms": 1e3 * seconds / emitted,
        **bound.ratios(seconds, case.rows, case.num_draft, context, emitted), "packed_mb": bound.model.packed / 1e6,
        "parts": {"host": spread(series.host), "device": spread(series.device)},
        "apart_ms": 1e3 * statistics.median(sum(parts.values()) for parts in series.device),
        "apart_from_ms": 1e3 * statistics.median(series.apart_from),
    }  # fmt: skip


def _growth(case: Case, shorter: Case, found: dict[Case, Series], bound: StepBound) -> dict[str, float | None]:
    """How much longer than at a shorter context a step takes, and how long its K and V must."""
    if case == shorter:
        return {"growth_ms": None, "growth_kv_ms": None}
    kv_bytes = [bound.work(c.rows, c.num_draft, c.context).kv_bytes for c in (shorter, case)]
    return {
        "growth_ms": 1e3 * statistics.median(
            a - b for a, b in zip(found[case].medians, found[shorter].medians, strict=True)
        ),
        "growth_kv_ms": 1e3 * (kv_bytes[1] - kv_bytes[0]) / bound.rates.bytes_per_s,
    }  # fmt: skip


def _ratio(series: Series, other: Series) -> float:
    return statistics.median(a / b for a, b in zip(series.medians, other.medians, strict=True))


def spread(steps: Sequence[Parts]) -> dict[str, dict[str, float]]:
    """Part -> median, p90 and p99 in microseconds."""
    names = dict.fromkeys(name for parts in steps for name in parts)
    found = {name: [1e6 * parts.get(name, 0.0) for parts in steps] for name in names}
    return {
        name: {"median_us": statistics.median(own), "p90_us": percentile(own, 90), "p99_us": percentile(own, 99)}
        for name, own in found.items()
    }


def show(output: Output, results: dict[Case, dict[str, Any]]) -> None:
    """Print lines, and what the steps consist of."""
    output.heading()
    for case, result in results.items():
        output.line(case._asdict(), result)
    for text in parts_beside([(case.name, result) for case, result in results.items()]):
        output.text(f"\n{text}\n")


def parts_beside(steps: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """Tables of the parts of some steps each, which are a name and what `values` found."""
    for some in (steps[i : i + BESIDE] for i in range(0, len(steps), BESIDE)):
        columns = [parts_column(result) for _, result in some]
        names = dict.fromkeys(name for column in columns for name in column)
        filled = [{name: column.get(name) for name in names} for column in columns]
        yield "\n".join(side_by_side([name for name, _ in some], filled))


def parts_column(result: dict[str, Any]) -> dict[str, str]:
    """Lines of one variant in the table of parts, microseconds."""
    column = {
        f"{where}: {name}": " / ".join(f"{value:.0f}" for value in own.values())
        for where, parts in result["parts"].items()
        for name, own in parts.items()
    }
    column["device: total of the parts"] = f"{1e3 * result['apart_ms']:.0f}"
    column["device: the real step"] = f"{1e3 * result['apart_from_ms']:.0f}"
    column["device: idle before it"] = f"{result['idle_us']:.0f}"
    return column


def run_command(args: argparse.Namespace) -> int:
    settle(args)
    if args.overhead:
        show_overhead(args)
        return 0
    module = load(args)
    dtype = next(module.parameters()).dtype
    rates = measured_rates(args.device, dtype)
    output = Output("bench_step", args, dtype, COLUMNS)
    results: dict[Case, dict[str, Any]] = {}
    made: dict[tuple[str, int], Variant] = {}
    try:
        made.update(variants(args, module))
        bounds = {key: StepBound.of(rates, variant.engine) for key, variant in made.items()}
        for mode, k in made:
            if k == args.num_draft[0]:
                output.text(f"{mode}: {bounds[mode, k].counted}")
        for _, some in itertools.groupby(cases(args), lambda case: case.rows):
            found = measure(args, list(some), made)
            lines = {case: values(case, found, bounds[case.mode, case.num_draft]) for case in found}
            show(output, lines)
            results |= lines
    finally:
        for variant in made.values():
            variant.engine.close()
    parts = {c.name: {n: own["median_us"] / 1e3 for n, own in r["parts"]["device"].items()} for c, r in results.items()}
    plot_bars(args.plot, "Parts of a decode step on the device", "ms", parts)
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `graphspec bench step` takes."""
    add_common(parser)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-draft", type=int, nargs="+", default=[0, 5])
    parser.add_argument("--context", type=int, nargs="+", default=[128], help="tokens of each prompt")
    parser.add_argument("--depth", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["graph"])
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=["greedy"])
    parser.add_argument("--drafter", choices=("forced", "ngram"), default="forced")
    parser.add_argument("--accepted", type=int, help="forced: drafts accepted per step; default: half of k")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--steps", type=int, default=12, help="steps per turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each variant")
    parser.add_argument("--overhead", action="store_true", help="host cost of a replay per bucket, without kernels")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="with --overhead: the largest bucket")


COMMAND = Command(__doc__, add_arguments, run_command)
