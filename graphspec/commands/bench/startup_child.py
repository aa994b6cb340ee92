"""One start of an engine, for `graphspec bench startup`, which measures it in a process of its own. Says when each
phase was over, on the clock that all processes of a machine share.

    first line    {"model": name, "prompt": text, "config": fields of EngineConfig}
    answer        {"versions": "..."}
    second line   {}
    answer        {"at": {phase: seconds of the monotonic clock}, "weight_bytes": n, "kv_bytes": n, "peak_bytes": n}
"""

from __future__ import annotations

import time
from pathlib import Path

from graphspec.commands.bench.peer import Answer, Request, Run, answer
from graphspec.commands.command import quiet_transformers
from graphspec.commands.provenance import commit
from graphspec.engine.engine import Engine
from graphspec.records.config import EngineConfig
from graphspec.records.sampling_params import SamplingParams


class Watched(Engine):
    """Notes when the model was loaded."""

    loaded_at = 0.0

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.loaded_at = time.monotonic()
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]


def start(first: Request) -> tuple[Run, str]:
    quiet_transformers()
    at = {"import": time.monotonic()}
    engine = Watched.from_pretrained(first["model"], EngineConfig(**first["config"]))
    assert isinstance(engine, Watched)
    at |= {"load": engine.loaded_at, "engine": time.monotonic()}
    at["first token"], at["first decode step"] = serve(engine, first["prompt"])
    started = time.monotonic()
    again, _ = serve(engine, first["prompt"][::-1])
    found = {"at": at, "second_ttft_s": again - started, **memory(engine)}
    engine.close()
    return lambda _: found, commit()


def serve(engine: Engine, prompt: str) -> tuple[float, float]:
    """When the first token of a request came, and what the first decode step gave."""
    engine.add_request(prompt, SamplingParams(max_tokens=16, ignore_eos=True))
    times = []
    while engine.has_unfinished_requests():
        if any(output.new_token_ids for output in engine.step()):
            times.append(time.monotonic())
    return times[0], times[1]


def memory(engine: Engine) -> Answer:
    """Bytes of all weights, of all KV pages whether touched or not, and the most that was resident at any time."""
    runner = engine._runner
    models = [model for model in (runner._model, runner._draft) if model is not None]
    kv_caches = [kv_cache for model in models for kv_cache in model.kv_caches]
    return {
        "weight_bytes": sum(p.nbytes for model in models for p in model.module.parameters()),
        "kv_bytes": sum(kv_cache.nbytes for kv_cache in kv_caches),
        "peak_bytes": peak_bytes(),
    }


def peak_bytes() -> int:
    """Not `getrusage`, whose maximum a process inherits from the one that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    answer(start)
