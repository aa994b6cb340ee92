"""From a model and a configuration to a runner, which owns the device, and the scheduler that plans for it."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch import nn

from graphspec.engine.resolve import check_machine, free_memory, resolve
from graphspec.execution.runner import Runner
from graphspec.models.loading import draft_module, open_draft
from graphspec.models.paged_model import ModelFacts, PagedModel
from graphspec.models.paging import kv_layout
from graphspec.models.vocabulary import shared_ids
from graphspec.records.config import EngineConfig, ResolvedConfig
from graphspec.scheduling.scheduler import Scheduler, SchedulerConfig

log = logging.getLogger(__name__)


class Parts(NamedTuple):
    """What an engine consists of, besides what it tells users."""

    config: ResolvedConfig
    facts: ModelFacts
    runner: Runner
    scheduler: Scheduler


def build(model: nn.Module, tokenizer: Any, config: EngineConfig, draft_model: nn.Module | None) -> Parts:
    """Plug paged attention into the model and its draft model, and make everything that serves them.

    Raises ValueError, in one sentence, for what cannot work; the models are then as they were.
    """
    device = next(model.parameters()).device
    check_machine(config, device)
    module = draft_module(config, model, draft_model)
    with ExitStack() as undo:
        paged = PagedModel(model)
        undo.callback(paged.close)
        shared = None if module is None else shared_ids(tokenizer, config.draft_model)
        draft = None if module is None else open_draft(module, paged, shared)
        if draft is not None:
            undo.callback(draft.close)
        resolved = resolve(
            config,
            model_limit=paged.facts.max_positions,
            page_bytes=sum(kv_layout(m, config.page_size, 1).page_bytes for m in (paged, draft) if m is not None),
            free_bytes=free_memory(device),
        )
        runner = Runner(paged, resolved, device, draft)
        undo.pop_all()
    return Parts(resolved, paged.facts, runner, _scheduler_for(runner, resolved))


def _scheduler_for(runner: Runner, config: ResolvedConfig) -> Scheduler:
    user, drafter = config.user, runner.drafter
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=user.max_num_seqs,
            max_prefill_tokens=user.max_prefill_tokens,
            tiers=runner.tiers,
            lookahead=drafter.lookahead(config.num_draft),
            page_size=user.page_size,
            num_pages=config.num_pages,
            table_width=config.table_width,
            reads_prompt=drafter.reads_prompt,
            drafts_ahead=drafter.drafts_ahead,
            pad=runner.graph_plan.ladder.pad,
        )
    )
    if user.adaptive_speculation:
        profiled = runner.measure_steps()
        log.info("k is chosen among %s; steps measured as (rows, k, seconds): %s", runner.tiers, profiled)
        for step in profiled:
            scheduler.policy.costs.record_profiled(*step)
    return scheduler
