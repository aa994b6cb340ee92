"""One self-contained HTML page about the graphs of one owner: plan, timeline of steps, cost per graph, findings."""

from __future__ import annotations

import html
from collections.abc import Sequence

from graphs.debug.coverage import Coverage, ledger_cells, seconds_per_replay
from graphs.debug.keys import label, tone
from graphs.debug.padding import BatchSize
from graphs.guard import Finding

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


def page(
    title: str, sizes: Sequence[BatchSize], coverage: Coverage, findings: Sequence[Finding], *, steps: str = "steps"
) -> str:
    """The whole page: how batches are padded, what became of a run, and what the guard found. `steps` is what the
    owner calls them."""
    on, count = coverage.num_on_graph, len(coverage.timeline)
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="{"ok" if on == count else "bad"}">{on} of {count} {steps} replayed a captured graph</p>',
        "<h2>Plan</h2><p>Batch size, and the rows of the graph that serves it. Darker: more padding.</p>",
        _heat_map(sizes),
        f"<h2>Steps</h2><p>All {steps} of the run in order; colour is the number of rows, red is off graph.</p>",
        _timeline(coverage),
        "<h2>Graphs</h2>",
        _graphs(coverage),
        "<h2>Findings</h2>",
        _findings(findings),
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style><body>{''.join(body)}</body></html>\n"
    )


def _heat_map(sizes: Sequence[BatchSize]) -> str:
    cells = []
    for size in sizes:
        share = size.padding
        colour = f"hsl(28 {round(90 * min(1.0, 2 * share))}% {round(95 - 60 * share)}%)" if share else "#e3f2e8"
        tip = f"batch {size.batch}: {size.rows} rows, {size.positions} positions, {100 * share:.0f} % padding"
        cells.append(
            f'<div style="background:{colour}" title="{tip}">{size.batch}&#8239;&rarr;&#8239;{size.rows}</div>'
        )
    return f'<div class="heat">{"".join(cells)}</div>'


def _timeline(coverage: Coverage) -> str:
    tones = sorted({tone(key) for key, _ in coverage.timeline})
    colours = {t: f"hsl(208 52% {82 - round(52 * i / max(1, len(tones) - 1))}%)" for i, t in enumerate(tones)}
    parts = []
    for stretch in coverage.stretches():
        tip = f"steps {stretch.start} to {stretch.last}: {label(stretch.key)} {stretch.off_graph}"
        colour = OFF_GRAPH if stretch.off_graph else colours[tone(stretch.key)]
        parts.append(f'<div style="flex:{stretch.count};background:{colour}" title="{html.escape(tip)}"></div>')
    named = [(colour, html.escape(name)) for (_, name), colour in colours.items()]
    if coverage.num_on_graph < len(coverage.timeline):
        named.append((OFF_GRAPH, "off graph"))
    legend = "".join(f'<span><i style="background:{colour}"></i>{name}</span>' for colour, name in named)
    return f'<div class="line">{"".join(parts)}</div><p class="legend">{legend}</p>'


def _graphs(coverage: Coverage) -> str:
    if not coverage.ledger:
        return "<p>none was captured</p>"
    pools, static = coverage.pool_bytes, coverage.static_bytes
    widest = max(pools, static, 1)
    bars = "".join(
        f'<tr><td class="l">{what}</td><td>{size / 2**20:.1f} MiB</td>'
        f'<td class="l"><span class="bar" style="width:{round(420 * size / widest)}px"></span></td></tr>'
        for what, size in (("buffers, shared by all graphs", static), ("pools, of the graphs alone", pools))
    )
    slowest = max(map(seconds_per_replay, coverage.ledger)) or 1.0
    rows = [ledger_cells(line) for line in coverage.ledger]
    lines = ["<tr>" + "".join(f"<th>{html.escape(heading)}</th>" for heading in rows[0]) + '<th class="l"></th></tr>']
    for line, row in zip(coverage.ledger, rows, strict=True):
        width = round(220 * seconds_per_replay(line) / slowest)
        bar = f'<td class="l"><span class="bar" style="width:{width}px"></span></td>'
        lines.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row.values()) + bar + "</tr>")
    return f"<table>{''.join(lines)}</table><h2>Memory</h2><table>{bars}</table>"


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return '<p class="ok">the guard found nothing in the step</p>'
    items = (
        f"<li><code>{html.escape(f.line)}</code> <b>{html.escape(f.kind)}</b>: {html.escape(f.what)}: "
        f"{html.escape(f.why)}.<br>{html.escape(f.remedy)}</li>"
        for f in findings
    )
    return f"<ul>{''.join(items)}</ul>"
