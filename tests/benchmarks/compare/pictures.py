"""Pictures of a result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .plot import pyplot
from .result import Result
from .rows import METRICS, Row
from .verdict import figure

BY_STREAMS = ("throughput", "first_token", "pace")
BARS = {"reuse": "first_token", "stall": "longest_gap"}


def draw(result: Result, folder: Path) -> list[str]:
    """SVG files in `folder`; their names. Raises `NotInstalled` if matplotlib is missing."""
    plots = pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    heads = dict.fromkeys((row.run, row.model, row.format) for row in result.rows)
    for number, head in enumerate(heads):
        rows = [row for row in result.rows if (row.run, row.model, row.format) == head]
        title = f"{head[1]}, {head[2]}"
        speed = [row for row in rows if row.part == "speed"]
        if speed:
            names.append(_save(_lines(plots, title, speed), folder / f"speed-{number}.svg"))
        for part, metric in BARS.items():
            chosen = [row for row in rows if row.part == part and metric in row.figures]
            if chosen:
                drawn = _bars(plots, title, chosen, metric)
                names.append(_save(drawn, folder / f"{part}-{number}.svg"))
    plots.close("all")
    return names


def _lines(plots: Any, title: str, rows: Sequence[Row]) -> Any:
    drawn, axes = plots.subplots(1, len(BY_STREAMS), figsize=(13, 4))
    for ax, metric in zip(axes, BY_STREAMS, strict=True):
        for server in dict.fromkeys(row.server for row in rows):
            own = [row for row in rows if row.server == server]
            counts = [int(row.case.split()[0]) for row in own]
            values = [figure(row.figures[metric]) for row in own]
            points = [(n, v) for n, v in zip(counts, values, strict=True) if v is not None]
            ax.plot([n for n, _ in points], [v for _, v in points], marker="o", label=server)
        ax.set_xscale("log", base=2)
        shown = sorted({int(row.case.split()[0]) for row in rows})
        ax.set_xticks(shown, [str(count) for count in shown])
        ax.set_xlabel("streams")
        ax.set_ylabel(f"{METRICS[metric].title}, {METRICS[metric].unit}")
        ax.set_ylim(bottom=0)
    axes[0].legend()
    drawn.suptitle(title)
    return drawn


def _bars(plots: Any, title: str, rows: Sequence[Row], metric: str) -> Any:
    drawn, ax = plots.subplots(figsize=(10, 4.5))
    cases = list(dict.fromkeys(row.case for row in rows))
    servers = list(dict.fromkeys(row.server for row in rows))
    width = 0.8 / len(servers)
    for at, server in enumerate(servers):
        own = {row.case: figure(row.figures[metric]) for row in rows if row.server == server}
        places = [index + at * width for index, _ in enumerate(cases)]
        ax.bar(places, [own.get(case) or 0.0 for case in cases], width, label=server)
    ax.set_xticks(
        [index + 0.4 - width / 2 for index, _ in enumerate(cases)], cases, rotation=20, ha="right"
    )
    ax.set_ylabel(f"{METRICS[metric].title}, {METRICS[metric].unit}")
    ax.set_title(title)
    ax.legend()
    return drawn


def _save(drawn: Any, path: Path) -> str:
    drawn.tight_layout()
    drawn.savefig(path)
    return path.name
