"""The result of a run, or of several runs."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import typer
from pydantic import TypeAdapter, ValidationError

from mlx_provider.errors import BadRequest

from .rows import Row
from .sides import Absent

RESULT, REPORT = "result.json", "report.md"


@dataclass
class Result:
    """Stats, and the runs that they are from."""

    runs: list[dict[str, Any]]
    """Command, time, machine, versions."""
    rows: list[Row] = field(default_factory=list)
    absent: list[Absent] = field(default_factory=list)
    deaths: list[Absent] = field(default_factory=list)
    """Servers whose process ended before its time, and how."""


_FORM = TypeAdapter(Result)


def save(result: Result, folder: Path) -> None:
    """`result.json` and `report.md`."""
    from .markdown import report

    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT).write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
    (folder / REPORT).write_text(report(result), encoding="utf-8")


def show(result: Result, out: Path | None) -> None:
    """The report on stderr, files in `out`, the result as the last line."""
    from .markdown import report

    if out is not None:
        save(result, out)
    typer.echo(report(result), err=True)
    typer.echo(json.dumps(asdict(result)))


def read(path: Path) -> Result:
    """A file of `save`, or a folder that has one. Raises `BadRequest`."""
    path = path / RESULT if path.is_dir() else path
    try:
        return _FORM.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        why = str(error).splitlines()[0]
        raise BadRequest(f"{path} is no result of `compare`: {why}", param="file") from None


def merged(results: Sequence[Result]) -> Result:
    """All figures. Ratios stay within a run: each row keeps the run that it is from."""
    whole = Result([])
    for each in results:
        first = len(whole.runs)
        whole.runs += each.runs
        whole.rows += [replace(row, run=row.run + first) for row in each.rows]
        whole.absent += [one for one in each.absent if one not in whole.absent]
        whole.deaths += each.deaths
    return whole
