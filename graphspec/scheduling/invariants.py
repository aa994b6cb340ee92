"""What must hold of queues, slots and pages between any two steps, and how to show them. No torch."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import Any

import numpy as np

from graphspec.records.launch import StepPlan, placeholders_of_decode
from graphspec.records.request import Request
from graphspec.scheduling.page_pool import PagePool
from graphspec.scheduling.slot_table import FREE, PREFILL, SlotTable

DESCRIBED = ("epoch", "settled", "prefilled", "placeholders", "min_in_flight", "limit", "last_step", "num_pages")


def describe(table: SlotTable, pool: PagePool, waiting: Collection[Request]) -> dict[str, Any]:
    """Queues, slots and pages in JSON types, for `Engine.dump_state`."""
    running = [
        {
            "slot": slot,
            "request_id": request.request_id,
            "index": request.index,
            "phase": "prefill" if table.phase[slot] == PREFILL else "decode",
            **{name: int(getattr(table, name)[slot]) for name in DESCRIBED},
        }
        for slot, request in enumerate(table.request)
        if request is not None
    ]
    pages = {"available": pool.num_available, "fenced": pool.num_fenced, "known_by_hash": pool.num_known}
    return {"waiting": [r.request_id for r in waiting], "running": running, "pages": pages}


def check(
    table: SlotTable, pool: PagePool, waiting: Collection[Request], in_flight: list[StepPlan], page_size: int
) -> None:
    """Assert every invariant of queues, slots and pages, given the launches that are not answered yet."""
    pool.check(page for slot in range(table.num_slots) for page in table.pages(slot))
    placeholders, fewest = np.zeros_like(table.placeholders), np.zeros_like(table.min_in_flight)
    for plan in in_flight:
        if (p := plan.prefill) is not None:
            current = p.slots[p.final & (table.epoch[p.slots] == p.epochs)]
            placeholders[current] += 1
            fewest[current] += 1
        if (d := plan.decode) is not None:
            current = d.slots[table.epoch[d.slots] == d.epochs]
            placeholders[current] += placeholders_of_decode(d.num_draft)
            fewest[current] += 1
    assert (placeholders == table.placeholders).all(), "placeholders are not the sum over launches in flight"
    assert (fewest == table.min_in_flight).all(), "the fewest tokens in flight are not one per sampling launch"
    running = np.flatnonzero(table.phase != FREE)
    assert (table.settled[running] < table.limit[running]).all(), "a request runs past its limit"
    for slot in running.tolist():
        request = table.request[slot]
        assert request is not None
        assert request.slot == slot
        assert table.settled[slot] == request.num_tokens, "settled differs from what was delivered"
        owned, reach = int(table.num_pages[slot]), int(table.settled[slot])
        assert owned * page_size >= reach, "a request owns fewer pages than it has settled tokens"
        assert (table.page_table[slot, owned:] == table.scratch_page).all()
    assert all(a.rank < b.rank for a, b in pairwise(waiting))
