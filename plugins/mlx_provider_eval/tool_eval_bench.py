"""Runs the unchanged tool-eval-bench (github.com/SeraphimSerapis/tool-eval-bench).

This separate program needs its own environment: its `rich` is newer than LiteLLM's proxy allows.
Options and the report's fields are those of version 3.0.0.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_provider.commands import direct
from mlx_provider.errors import NotInstalled, RequestFailed

from .conditions import conditions, of_subject
from .report import Table, measured_of, surroundings
from .stage import Staged

COMMAND = "tool-eval-bench"
END_LIMIT = 10.0
Result = dict[str, Any]


def program(environ: Mapping[str, str] = os.environ) -> str:
    """The program's path. Raises `NotInstalled` with the command that installs it."""
    found = shutil.which(COMMAND, path=environ.get("PATH"))
    if found is None:
        raise NotInstalled(
            f"{COMMAND} is not installed: uv tool install {COMMAND} (or pipx install {COMMAND})"
        )
    return found


def measured(
    path: str, arguments: Sequence[str], staged: Staged, done: Callable[[], None]
) -> Result:
    """One subject's result; `done` is called at its end.

    Raises `RequestFailed` with the program's last lines if it fails.
    """
    with tempfile.TemporaryDirectory(prefix="mlxp-") as scratch:
        report = _run(path, staged, arguments, Path(scratch))
    done()
    try:
        categories = {
            each["label"]: [each["earned"], each["max"]]
            for each in report["scores"]["category_scores"]
        }
        points = [report["scores"]["total_points"], report["scores"]["max_points"]]
        own = {"version": report["tool_eval_bench_version"], "report": report}
    except (KeyError, TypeError) as error:
        raise RequestFailed(f"{COMMAND}: a report of another form, without {error}") from None
    return {**of_subject(staged), **own, "categories": categories, "points": points}


def _run(path: str, staged: Staged, arguments: Sequence[str], scratch: Path) -> Result:
    """Run it in an empty folder for its database and reports."""
    command = [path, "run", "--base-url", staged.url, "--model", staged.name, "--no-live"]
    command += ["--no-probe-engine", "--json-file", "report.json", "--output-dir", "reports"]
    environment = {**os.environ, **direct(os.environ), "TOOL_EVAL_API_KEY": staged.key}
    with (scratch / "log").open("w+b") as log:
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=scratch,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # only this process gets a signal, and ends the program
        )
        try:
            code = process.wait()
        finally:
            _end(process)
    try:
        report: Result = json.loads((scratch / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        staged.require_gateway()
        lines = (scratch / "log").read_text(errors="replace").strip().splitlines()
        summary = " / ".join(lines[-5:]) or "nothing in its log"
        raise RequestFailed(f"{COMMAND} ended with exit code {code}: {summary}") from None
    return report


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def whole(subjects: Sequence[Result]) -> Result:
    return {"eval": COMMAND, **conditions(), "subjects": list(subjects)}


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Points by category, a column for each subject."""
    found = measured_of(result)
    names = list(dict.fromkeys(name for each in found for name in each["categories"]))
    rows = [[name, *(_of(each["categories"].get(name)) for each in found)] for name in names]
    rows.append(["all", *(_of(each["points"]) for each in found)])
    return [Table("points, by category", ["category", *(each["label"] for each in found)], rows)]


def _of(pair: Any) -> str:
    return "-" if pair is None else f"{pair[0]}/{pair[1]}"


def markdown(result: Mapping[str, Any]) -> str:
    versions = ", ".join(dict.fromkeys(each["version"] for each in measured_of(result)))
    parts = [f"# {COMMAND} {versions}", surroundings(result)]
    parts += [f"## {table.title}\n\n{table.markdown()}" for table in tables(result)]
    return "\n\n".join(parts) + "\n"
