"""graphspec: LLM inference where speculation makes every decode step the same shape."""

from pathlib import Path

import attention
import graphs

_ROOT = Path(__file__).resolve().parent.parent
for _package in (graphs, attention):
    _found = Path(str(_package.__file__)).resolve().parent
    if _found.parent != _ROOT:
        raise ImportError(
            f'graphspec needs its own package "{_package.__name__}" from {_ROOT}, but {_found} shadows it: '
            "remove that folder from the path or uninstall its distribution"
        )

from graphspec.engine.async_engine import AsyncEngine  # noqa: E402
from graphspec.engine.engine import Engine  # noqa: E402
from graphspec.engine.stats import EngineStats  # noqa: E402
from graphspec.records.config import EngineConfig  # noqa: E402
from graphspec.records.outputs import Completion, Logprob, StepOutput, Usage  # noqa: E402
from graphspec.records.sampling_params import SamplingParams  # noqa: E402

__all__ = [
    "AsyncEngine",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Logprob",
    "SamplingParams",
    "StepOutput",
    "Usage",
]
