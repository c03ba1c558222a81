"""Runs subjects one after the other, saves each result, and shows all at the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from .report import Table, measured_of
from .screen import ending, print_table
from .stage import Skipped, Staged, staging
from .subjects import Subject

Result = dict[str, Any]


@dataclass(frozen=True)
class Report:
    """A result in readable form."""

    tables: Sequence[Table]
    guidance: Sequence[str]


@dataclass(frozen=True)
class Evaluation:
    name: str
    """Name of its file."""
    asks: Callable[[Staged], int]
    """Number of requests for a subject."""
    measured: Callable[[Staged, Callable[[], None]], Result]
    """One subject's result, as JSON types. The callable is called after each reply. A result with
    `skipped` has the reason why there are no measurements."""
    whole: Callable[[Sequence[Result]], Result]
    report: Callable[[Result], Report]


def run(evaluation: Evaluation, chosen: Sequence[Subject], out: Path | None) -> Result:
    """The complete result. With `out`, its files are updated after each subject.

    Raises `EngineUnavailable` if the gateway has ended, `typer.Exit` for a signal.
    """
    found: list[Result] = []
    with ending() as screen, closing(staging(chosen, screen.tell)) as stages:
        for staged in stages:
            if isinstance(staged, Skipped):
                found.append({**staged.subject.encoded(), "skipped": staged.why})
            else:
                with screen.counting(evaluation.asks(staged)) as done:
                    found.append(evaluation.measured(staged, done))
            if out is not None:
                text = json.dumps(evaluation.whole(found), indent=1, ensure_ascii=False)
                (out / f"{evaluation.name}.json").write_text(f"{text}\n", encoding="utf-8")
    return evaluation.whole(found)


def show(evaluation: Evaluation, result: Result, out: Path | None, *, as_json: bool) -> None:
    """Print on stdout. Exit code 1: nothing was measured."""
    report = evaluation.report(result)
    if as_json:
        typer.echo(json.dumps(result, ensure_ascii=False))
    else:
        for table in report.tables:
            print_table(table)
        for line in report.guidance:
            typer.echo(line.replace("`", ""))
    for each in result["subjects"]:
        if each.get("skipped"):
            typer.echo(f"{each['label']}: not measured: {each['skipped']}", err=True)
    if out is not None:
        typer.echo(f"written: {out / evaluation.name}.json", err=True)
    if not measured_of(result):
        raise typer.Exit(1)
