"""Plots of benchmarks, drawn without a display. matplotlib is optional."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

Points = Sequence[tuple[float, float]]


def check_plot(path: Path | None) -> None:
    """Raise ValueError, in one sentence, if a plot could not be written there; before anything is measured."""
    if path is None:
        return
    if path.suffix != ".png" or not path.parent.is_dir():
        raise ValueError(f'--plot takes the name of a PNG file in a folder that exists, got "{path}"')
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")


def plot_lines(
    path: Path | None, title: str, x: str, y: str, series: Mapping[str, Points], bound: Mapping[str, Points]
) -> None:
    """Points joined per series, over logarithmic axes; those of `bound` are dashed, in the colour of their series."""
    if path is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, points in series.items():
        (line,) = axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
        axes.plot(*zip(*sorted(bound[name]), strict=True), linestyle="--", color=line.get_color())
    axes.set(title=title, xlabel=x, ylabel=y, xscale="log", yscale="log")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def plot_bars(path: Path | None, title: str, x: str, bars: Mapping[str, Mapping[str, float]]) -> None:
    """One horizontal bar per name, of stacked parts."""
    if path is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.6 + 0.4 * len(bars)), layout="constrained")
    axes = figure.subplots()
    names = list(bars)
    left = dict.fromkeys(names, 0.0)
    for part in dict.fromkeys(part for parts in bars.values() for part in parts):
        lengths = [bars[name].get(part, 0.0) for name in names]
        axes.barh(names, lengths, left=list(left.values()), label=part)
        left = {name: left[name] + length for name, length in zip(names, lengths, strict=True)}
    axes.set(title=title, xlabel=x)
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", fontsize="small", ncols=5)
    figure.savefig(path, dpi=120)
