"""Times of the engine loop, and the snapshot of all counters that `Engine.stats` returns. No torch."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from graphspec.execution.runner import GraphStats
from graphspec.scheduling.spec_stats import SpecStats


def _recent() -> deque[float]:
    return deque(maxlen=10_000)  # bounded, as a serving process never ends


@dataclass
class LoopTimes:
    """Seconds of the engine loop: of recent steps, one by one, and in total."""

    host: deque[float] = field(default_factory=_recent)  # host work of one Engine.step(), the wait left out
    busy: deque[float] = field(default_factory=_recent)  # device computing one launch
    idle: deque[float] = field(default_factory=_recent)  # device waiting for the host before one launch
    num_launches: int = 0
    total_busy: float = 0.0
    total_idle: float = 0.0  # device waiting for the host between launches
    total_wait: float = 0.0  # host waiting for the device

    def record_launch(self, busy: float, idle_before: float | None) -> None:
        """`idle_before` is None if the device waited for a request before the launch, and not for the host."""
        self.busy.append(busy)
        self.total_busy += busy
        if idle_before is not None:
            self.idle.append(idle_before)
            self.total_idle += idle_before
        self.num_launches += 1


@dataclass(frozen=True)
class EngineStats:
    """A snapshot, returned by `Engine.stats()`. See `SpecStats` for the definitions of the counters."""

    num_steps: int
    num_output_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_delivered_draft_tokens: int
    num_draft_tokens_per_pos: list[int]
    num_accepted_tokens_per_pos: list[int]
    num_steps_per_k: dict[int, int]
    draft_acceptance_rate: float
    mean_acceptance_length: float
    acceptance_rates: list[float]
    wasted_positions: int
    num_preemptions: int
    prefix_cache_hit_rate: float  # cached tokens / tokens of admitted requests
    num_running: int
    num_waiting: int
    free_pages: int  # available now: free, or cached and evictable
    off_graph_decode_steps: int
    off_graph_reasons: dict[str, int]
    num_graphs: int
    capture_seconds: float
    num_compiled_regions: int  # pieces of code Inductor made; constant once every graph is captured
    host_us_per_step: float  # median
    device_ms_per_step: float  # median
    device_idle_share: float  # of the device's time while there were requests, spent waiting for the host


def snapshot(
    spec: SpecStats, times: LoopTimes, graphs: GraphStats, num_running: int, num_waiting: int, free_pages: int
) -> EngineStats:
    total = times.total_busy + times.total_idle
    return EngineStats(
        num_steps=times.num_launches,
        num_output_tokens=spec.num_output_tokens,
        num_drafts=spec.num_drafts,
        num_draft_tokens=spec.num_draft_tokens,
        num_accepted_tokens=spec.num_accepted_tokens,
        num_delivered_draft_tokens=spec.num_delivered_draft_tokens,
        num_draft_tokens_per_pos=spec.num_draft_tokens_per_pos.tolist(),
        num_accepted_tokens_per_pos=spec.num_accepted_tokens_per_pos.tolist(),
        num_steps_per_k=dict(sorted(spec.num_steps_per_k.items())),
        draft_acceptance_rate=spec.draft_acceptance_rate,
        mean_acceptance_length=spec.mean_acceptance_length,
        acceptance_rates=spec.acceptance_rates,
        wasted_positions=spec.wasted_positions,
        num_preemptions=spec.num_preemptions,
        prefix_cache_hit_rate=spec.prefix_cache_hits / max(1, spec.prefix_cache_queries),
        num_running=num_running,
        num_waiting=num_waiting,
        free_pages=free_pages,
        off_graph_decode_steps=sum(graphs.off_graph_reasons.values()),
        off_graph_reasons=graphs.off_graph_reasons,
        num_graphs=graphs.num_graphs,
        capture_seconds=graphs.capture_seconds,
        num_compiled_regions=graphs.num_compiled_regions,
        host_us_per_step=1e6 * statistics.median(times.host) if times.host else 0.0,
        device_ms_per_step=1e3 * statistics.median(times.busy) if times.busy else 0.0,
        device_idle_share=times.total_idle / total if total else 0.0,
    )
