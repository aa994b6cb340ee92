"""Counters of speculation and of the step loop. No torch."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from graphspec.step import IntArray


class SpecStats:
    """Acceptance, counted the way the field counts it.

    num_drafts                 decode rows that verified drafts (one per row and step)
    num_draft_tokens           verified draft positions: num_drafts * k, if k is the same in all steps
    num_accepted_tokens        drafts accepted, *before* a stop rule cut the row
    num_delivered_draft_tokens drafts accepted and delivered, *after* that cut
    num_draft_tokens_per_pos, num_accepted_tokens_per_pos   how often the draft at position i was verified, and how
                               often it was accepted, before the cut
    num_steps_per_k            answered decode steps by k
    wasted_positions           positions computed for requests that had already ended; in no other counter
    num_output_tokens          tokens delivered
    prefix_cache_queries, _hits   tokens of admitted requests; those of them whose KV was already cached
    """

    def __init__(self, num_draft: int) -> None:
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = self.num_delivered_draft_tokens = 0
        self.num_draft_tokens_per_pos: IntArray = np.zeros(num_draft, np.int64)
        self.num_accepted_tokens_per_pos: IntArray = np.zeros(num_draft, np.int64)
        self.num_steps_per_k: Counter[int] = Counter()
        self.wasted_positions = self.num_output_tokens = self.num_preemptions = 0
        self.prefix_cache_queries = self.prefix_cache_hits = 0

    def record(self, num_draft: int, accepted: IntArray, delivered: IntArray) -> None:
        """Count the rows of one decode launch: drafts accepted before and delivered after the stop rules."""
        self.num_steps_per_k[num_draft] += 1
        if num_draft == 0:
            return
        self.num_drafts += len(accepted)
        self.num_draft_tokens += len(accepted) * num_draft
        self.num_draft_tokens_per_pos[:num_draft] += len(accepted)
        self.num_accepted_tokens += int(accepted.sum())
        self.num_delivered_draft_tokens += int(delivered.sum())
        at_most = np.bincount(accepted, minlength=1 + num_draft).cumsum()  # rows that accepted no more than 0, 1 ...
        self.num_accepted_tokens_per_pos[:num_draft] += len(accepted) - at_most[:num_draft]

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted drafts per verified row; 1.0 without speculation."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted drafts per verified draft; 0.0 without speculation."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_rates(self) -> list[float]:
        """Share of verified rows whose draft at position 0, 1, ... was accepted."""
        rates: list[float] = (self.num_accepted_tokens_per_pos / np.maximum(1, self.num_draft_tokens_per_pos)).tolist()
        return rates


def _recent() -> deque[float]:
    return deque(maxlen=10_000)  # a serving process runs for ever


@dataclass
class LoopTimes:
    """Seconds of the engine loop: of recent steps, one by one, and in total."""

    host: deque[float] = field(default_factory=_recent)  # host work of one Engine.step(), the wait left out
    busy: deque[float] = field(default_factory=_recent)  # device computing one launch
    idle: deque[float] = field(default_factory=_recent)  # device waiting for the host before one launch
    num_launches: int = 0
    total_busy: float = 0.0
    total_idle: float = 0.0  # device waiting for the host between launches

    def record_launch(self, busy: float, idle_before: float | None) -> None:
        """`idle_before` is None after a rest: the device waited for a request then, not for the host."""
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


@dataclass(frozen=True)
class GraphStats:
    """What became of decode steps."""

    off_graph_reasons: dict[str, int]
    num_graphs: int
    capture_seconds: float
    num_compiled_regions: int


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
