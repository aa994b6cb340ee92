"""One self-contained HTML page about the graphs of an engine: plan, timeline of steps, cost per graph, findings."""

from __future__ import annotations

import html
from itertools import groupby
from typing import Any

STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; color: #1c2733; max-width: 1080px; margin: 32px auto; padding: 0 24px }
h1 { font-size: 24px; margin: 0 } h2 { font-size: 17px; margin: 36px 0 8px } p { color: #52606d; margin: 4px 0 12px }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } td, th { padding: 3px 12px; text-align: right }
th { color: #52606d; font-weight: 600; border-bottom: 1px solid #cbd2d9 } td.l, th.l { text-align: left }
.heat { display: flex; flex-wrap: wrap; gap: 3px } .heat div { width: 60px; padding: 5px 0; text-align: center;
border-radius: 4px; font-size: 12px }
.bar { display: inline-block; height: 11px; background: #3e7cb1; border-radius: 2px }
.line { display: flex; height: 34px; border-radius: 4px; overflow: hidden } .line div { min-width: 1px }
.legend span { display: inline-block; margin-right: 16px; font-size: 12px }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px }
.ok { color: #207a4b } .bad { color: #b3261e }
code { background: #f0f4f8; padding: 1px 4px; border-radius: 3px }
"""

OFF_GRAPH = "#b3261e"


def page(title: str, plan: dict[str, Any], coverage: dict[str, Any], findings: list[dict[str, Any]]) -> str:
    """The whole page. Arguments are what `graph_debug.py plan`, `coverage` and `guard` compute."""
    steps = coverage["timeline"]
    on = sum(not step["off_graph"] for step in steps)
    verdict = "ok" if on == len(steps) else "bad"
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="{verdict}">{on} of {len(steps)} decode steps replayed a captured graph</p>',
        "<h2>Plan</h2><p>Batch size, and the rows of the graph that serves it. Darker: more padding.</p>",
        _heat_map(plan["sizes"]),
        "<h2>Steps</h2><p>Every decode step of the run in order; colour is the number of rows, red is off graph.</p>",
        _timeline(steps),
        "<h2>Graphs</h2>",
        _graphs(coverage["graphs"]),
        "<h2>Findings</h2>",
        _findings(findings),
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style><body>{''.join(body)}</body></html>\n"
    )


def _heat_map(sizes: list[dict[str, Any]]) -> str:
    cells = []
    for size in sizes:
        share = size["padding"]
        colour = f"hsl(28 {round(90 * min(1.0, 2 * share))}% {round(95 - 60 * share)}%)" if share else "#e3f2e8"
        tip = f"batch {size['batch']}: {size['rows']} rows, {size['positions']} positions, {100 * share:.0f} % padding"
        cells.append(
            f'<div style="background:{colour}" title="{tip}">{size["batch"]}&#8239;&rarr;&#8239;{size["rows"]}</div>'
        )
    return f'<div class="heat">{"".join(cells)}</div>'


def _timeline(steps: list[dict[str, Any]]) -> str:
    rows = sorted({step["key"].rows for step in steps})
    colours = {r: f"hsl(208 52% {82 - round(52 * i / max(1, len(rows) - 1))}%)" for i, r in enumerate(rows)}
    parts, start = [], 0
    for (key, reason), group in groupby(steps, lambda s: (s["key"], s["off_graph"])):
        count = len(list(group))
        tip = f"steps {start} to {start + count - 1}: {key.rows} rows, k = {key.num_draft}, {key.sampler} {reason}"
        colour = OFF_GRAPH if reason else colours[key.rows]
        parts.append(f'<div style="flex:{count};background:{colour}" title="{html.escape(tip)}"></div>')
        start += count
    legend = "".join(f'<span><i style="background:{c}"></i>{r} rows</span>' for r, c in colours.items())
    if any(step["off_graph"] for step in steps):
        legend += f'<span><i style="background:{OFF_GRAPH}"></i>off graph</span>'
    return f'<div class="line">{"".join(parts)}</div><p class="legend">{legend}</p>'


def _graphs(graphs: list[dict[str, Any]]) -> str:
    if not graphs:
        return "<p>none was captured</p>"
    pools, static = sum(g["pool_bytes"] for g in graphs), graphs[0]["static_bytes"]
    widest = max(pools, static, 1)
    bars = "".join(
        f'<tr><td class="l">{what}</td><td>{size / 2**20:.1f} MiB</td>'
        f'<td class="l"><span class="bar" style="width:{round(420 * size / widest)}px"></span></td></tr>'
        for what, size in (("buffers, shared by all graphs", static), ("pools, of the graphs alone", pools))
    )
    slowest = max(g["launch_seconds"] / max(1, g["num_replays"]) for g in graphs) or 1.0
    head = ("rows", "k", "sampler", "replays", "capture s", "ops", "pool KiB", "ms per replay")
    lines = ["<tr>" + "".join(f"<th>{h}</th>" for h in head) + '<th class="l"></th></tr>']
    for g in graphs:
        key, each = g["key"], g["launch_seconds"] / max(1, g["num_replays"])
        times = (f"{g['capture_seconds']:.2f}", g["num_ops"] or "", g["pool_bytes"] // 1024, f"{1e3 * each:.2f}")
        cells = (key.rows, key.num_draft, key.sampler, g["num_replays"], *times)
        bar = f'<td class="l"><span class="bar" style="width:{round(220 * each / slowest)}px"></span></td>'
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + bar + "</tr>")
    return f"<table>{''.join(lines)}</table><h2>Memory</h2><table>{bars}</table>"


def _findings(findings: list[dict[str, Any]]) -> str:
    if not findings:
        return '<p class="ok">the guard found nothing in the engine\'s step</p>'
    items = (
        f"<li><code>{html.escape(f['line'])}</code> <b>{html.escape(f['kind'])}</b>: {html.escape(f['what'])}: "
        f"{html.escape(f['why'])}.<br>{html.escape(f['remedy'])}</li>"
        for f in findings
    )
    return f"<ul>{''.join(items)}</ul>"
