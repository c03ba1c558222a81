"""Stored results of `pytest --mlx-conformance` for an installed plugin."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from .. import __version__
from ..config import installed_version, state_folder
from ..hookspecs import PROJECT
from ..safe_open import read_own, replace_own
from .discovery import Plugin, digest

FORMAT = 1
LONGEST = 4 * 2**20
"""Most bytes of a record."""
SOFTWARE = ("mlx", "mlx-lm", "mlx-vlm", "llguidance")
"""Packages that a plugin's results depend on, besides this one."""
NAMED = 5
"""Failed checks that one line names."""
Outcome = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class CheckResult:
    """One check of one record of a plugin."""

    subject: str
    """`plugin`, or kind and name of a record: `tool parser angle`."""
    variant: str
    """Checkpoint and format of a model; empty for other subjects."""
    check: str
    outcome: Outcome
    told: str = ""

    @property
    def name(self) -> str:
        return f"{self.subject}{self.variant and f' [{self.variant}]'}: {self.check}"


@dataclass(frozen=True)
class ConformanceRecord:
    """One run of the checks for one plugin."""

    plugin: str
    distribution: str
    version: str
    software: Mapping[str, str]
    device: str
    date: str
    """ISO 8601, UTC."""
    source: str
    results: Sequence[CheckResult]

    def of(self, outcome: Outcome) -> list[CheckResult]:
        return [each for each in self.results if each.outcome == outcome]

    @property
    def summary(self) -> str:
        failed, count = self.of("failed"), len(self.results)
        made = f"{self.date[:10]}, mlx {self.software.get('mlx', 'none')} on {self.device}"
        skipped = f", {len(self.of('skipped'))} skipped" if self.of("skipped") else ""
        if not failed:
            return f"{len(self.of('passed'))} checks passed{skipped} ({made})"
        names = "; ".join(each.name for each in failed[:NAMED])
        more = f"; {len(failed) - NAMED} more" if len(failed) > NAMED else ""
        return f"{len(failed)} of {count} checks FAILED{skipped} ({made}): {names}{more}"

    def write(self) -> Path:
        """Raises `OSError`."""
        path = record_path(self.distribution, self.plugin)
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        replace_own(path, text.encode())
        return path


def record_path(distribution: str, plugin: str) -> Path:
    name = f"{quote(distribution, safe='')}+{quote(plugin, safe='')}.json"
    return state_folder() / "conformance" / name


def record_of(plugin: Plugin) -> ConformanceRecord | None:
    try:
        data = read_own(record_path(plugin.distribution, plugin.name), LONGEST)
        return _read(json.loads(data))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _read(fields: dict[str, Any]) -> ConformanceRecord:
    if fields.pop("format") != FORMAT:
        raise ValueError("written by another version")
    results = tuple(CheckResult(**each) for each in fields.pop("results"))
    return ConformanceRecord(**fields, results=results)


def stale(record: ConformanceRecord, plugin: Plugin) -> str:
    """Why a record is not valid for the installed software. Empty: it is valid."""
    if record.version != plugin.version:
        return f"of version {record.version}, not {plugin.version}"
    here = software()
    for name, then in record.software.items():
        if here.get(name) != then:
            return f"with {name} {then}, not {here.get(name, 'none')}"
    if record.source != source_digest(plugin):
        return "of other source files of that version"
    return ""


def for_people(plugin: Plugin) -> str:
    record = record_of(plugin)
    if record is None:
        return ""
    why = stale(record, plugin)
    return f"stale ({why}): {record.summary}" if why else record.summary


def for_programs(plugin: Plugin) -> dict[str, Any] | None:
    record = record_of(plugin)
    if record is None:
        return None
    return {
        **{name: value for name, value in asdict(record).items() if name != "results"},
        "stale": stale(record, plugin),
        "passed": len(record.of("passed")),
        "failed": [asdict(each) for each in record.of("failed")],
        "skipped": [asdict(each) for each in record.of("skipped")],
        "file": str(record_path(plugin.distribution, plugin.name)),
    }


def software() -> dict[str, str]:
    found = {name: installed_version(name) for name in SOFTWARE}
    own = {PROJECT.replace("_", "-"): __version__}
    return own | {name: number for name, number in found.items() if number}


def source_digest(plugin: Plugin) -> str:
    return " ".join(map(digest, entry_points(group=PROJECT, name=plugin.name)))
