"""The checks of `gpu_check.py` that run engines, on models with random weights."""

from __future__ import annotations

import gc
import statistics
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from transformers import AutoConfig, AutoModelForCausalLM

from graphspec import Engine, EngineConfig, SamplingParams
from graphspec.commands.bench import step
from graphspec.commands.bench.decode_load import decoding, timed_steps, tokens_needed
from graphspec.commands.bench.speed_of_light import StepBound, measured_rates
from lib.gpu_plan import MODELS, Plan
from lib.gpu_report import Row
from lib.light_table import fields_of

PROMPT = 32  # tokens before the decode steps that are timed


class RandomModels:
    """Models with random weights; only one is kept at a time."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._name, self._module = "", nn.Module()

    def __call__(self, name: str) -> nn.Module:
        if name != self._name:
            self._name, self._module = "", nn.Module()
            gc.collect()
            torch.manual_seed(0)
            config = AutoConfig.for_model(**MODELS[name], max_position_embeddings=2 * self._plan.max_model_len)
            with torch.device(self._plan.device):
                module = AutoModelForCausalLM.from_config(config, dtype=self._plan.dtype)
            self._name, self._module = name, module.eval().requires_grad_(False)
        return self._module


def engine(models: RandomModels, plan: Plan, model: str, k: int, **config: Any) -> Engine:
    settings: dict[str, Any] = {
        "num_speculative_tokens": k,
        "max_num_seqs": max(plan.rows),
        "max_model_len": plan.max_model_len,
        "kv_memory_fraction": 0.5,
        "capture": "lazy",
        "compile": plan.compile,
        **({} if k else {"drafter": "none"}),
        **config,
    }
    return Engine(models(model), config=EngineConfig(**settings))


def prompts(plan: Plan, model: str, count: int, length: int) -> list[list[int]]:
    vocab = MODELS[model]["vocab_size"] - 10
    return [[5 + (7 * i + (j * j) % 97) % vocab for j in range(length + i % 5)] for i in range(count)]


def tokens(
    models: RandomModels, plan: Plan, model: str, k: int, rows: int, **config: Any
) -> tuple[list[list[int]], int]:
    """Texts of `rows` requests, and the number of decode steps that left their graph."""
    params = [SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8 * (i % 2), seed=i) for i in range(rows)]
    with engine(models, plan, model, k, **config) as made:
        done = made.generate(prompts(plan, model, rows, 40), params, progress=False)
        return [c.token_ids for c in done], made.stats().off_graph_decode_steps


def check_graph(models: RandomModels, plan: Plan, model: str, name: str, k: int, rows: int) -> Row:
    on, off_graph = tokens(models, plan, model, k, rows, depth=0, attention_backend=name, compile=False)
    eager, _ = tokens(models, plan, model, k, rows, depth=0, attention_backend=name, enforce_eager=True)
    same = sum(a == b for a, b in zip(on, eager, strict=True))
    return {"ok": same == rows and off_graph == 0, "same_texts": f"{same} of {rows}", "off_graph": off_graph}


def check_depth(models: RandomModels, plan: Plan, model: str, drafter: dict[str, Any], k: int, rows: int) -> Row:
    ahead, off_graph = tokens(models, plan, model, k, rows, depth=1, **drafter)
    settled, _ = tokens(models, plan, model, k, rows, depth=0, **drafter)
    same = sum(a == b for a, b in zip(ahead, settled, strict=True))
    return {"ok": same == rows and off_graph == 0, "same_texts": f"{same} of {rows}", "off_graph": off_graph}


def check_step(models: RandomModels, plan: Plan, model: str, k: int, rows: int, **config: Any) -> Row:
    """Medians over steps in which `rows` requests decode."""
    with engine(models, plan, model, k, depth=1, **forced(k), **config) as made:
        params = SamplingParams(max_tokens=tokens_needed(k, plan.steps + 4), ignore_eos=True)
        with decoding(made, prompts(plan, model, rows, PROMPT), params):
            turn = timed_steps(made, plan.steps)
            kernels = kernels_per_step(made) if plan.device.type == "cuda" else None
        found = fields_of(turn, bound_of(plan, made), rows, k, PROMPT)
    return {
        "ok": True, "ms": found["step_ms"], "vs_light": found["vs_light"],
        "token_vs_plain_light": found["token_vs_plain_light"], "gap_us": 1e6 * statistics.median(turn.idle),
        "host_us": 1e6 * statistics.median(turn.host), "kernels": kernels,
        "mode": mode_of(made), "step": {"model": model, "rows": rows, "num_draft": k, "context": PROMPT, **found},
    }  # fmt: skip


def check_parts(models: RandomModels, plan: Plan, model: str, k: int, rows: int, **config: Any) -> Row:
    """The second turn: the first one captures."""
    with engine(models, plan, model, k, depth=1, **forced(k), **config) as made:
        case = step.Case(rows, PROMPT, mode_of(made), k, "greedy", 1)
        variant = step.Variant(made)
        turns = [step.Series() for _ in range(2)]
        for series in turns:
            variant.turn(case, plan.steps, series)
        found = step.values(case, {case: turns[1]}, bound_of(plan, made))
    return {
        "ok": True, "ms": found["device_ms"], "total_of_parts_ms": found["apart_ms"],
        "apart": {"model": model, **case._asdict(), **found},
    }  # fmt: skip


def forced(k: int) -> dict[str, Any]:
    return {"drafter": "forced", "forced_num_accepted": k // 2} if k else {}


def bound_of(plan: Plan, made: Engine) -> StepBound:
    return StepBound.of(measured_rates(plan.device.type, plan.dtype), made)


def mode_of(made: Engine) -> str:
    return "compiled" if made.config.user.compile else "graph"


def kernels_per_step(made: Engine) -> float:
    """Kernels, copies and fills per step, counted by the profiler over four steps."""
    steps = 4
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            made.step()
        torch.cuda.synchronize()
    return len([event for event in profile.events() or [] if event.device_type == DeviceType.CUDA]) / steps
