"""Runs the parts for one model after another."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlx_provider.commands import require_proxy

from . import answers, reuse, speed, stall
from .machine import machine, memory, versions
from .others import model_of
from .plan import Plan, Subject, refuse_too_large, subjects
from .progress import say
from .result import Result, save
from .rows import Row
from .sides import Absent, Side, opened

Part = Callable[[Plan, Subject, Sequence[Side]], Iterator[list[Row]]]
MEASURES: Mapping[str, Part] = {
    "answers": answers.measure,
    "speed": speed.measure,
    "reuse": reuse.measure,
    "stall": stall.measure,
}


def bench(plan: Plan, out: Path | None = None) -> Result:
    """Run the plan. `out` always has what has been measured so far.

    Raises `BadRequest`, `ModelNotFound`, `NotInstalled`, `EngineUnavailable` if nothing can be
    measured at all; errors of a server are figures.
    """
    plan.check()
    require_proxy()
    for other in plan.others:
        model_of(other)  # reports an address without a server before minutes are spent
    result = Result([_about(plan, out)])
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        for subject in subjects(plan, Path(scratch)):
            _measure(plan, subject, result, out, began)
    return result


def _measure(plan: Plan, subject: Subject, result: Result, out: Path | None, began: float) -> None:
    refuse_too_large(plan, subject, memory())
    with ExitStack() as ending:
        say(f"{subject.model}, {subject.format}: servers start")
        sides, absent = ending.enter_context(opened(plan, subject))
        result.absent += absent
        for part in plan.parts:
            say(f"{subject.model}, {subject.format}: {part}")
            for side in sides:
                side.ready()
            for rows in MEASURES[part](plan, subject, sides) if sides else ():
                result.rows += rows
                result.runs[0]["seconds"] = round(time.monotonic() - began)
                if out is not None:
                    save(result, out)
        for side in sides:
            side.died()
            named = side.name, subject.model, subject.format
            result.deaths += [Absent(*named, how) for how in side.deaths]


def _about(plan: Plan, out: Path | None) -> dict[str, Any]:
    return {
        "command": plan.command("" if out is None else str(out)),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": 0,
        "machine": machine(),
        "versions": versions(),
        "servers": {each.name: f"{each.base}, {model_of(each)}" for each in plan.others},
    }
