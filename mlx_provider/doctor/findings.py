"""Results of checks, for people and programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "note", "warn", "fail"]
STATES: tuple[State, ...] = ("fail", "warn", "note", "ok")
"""Worst first."""
COMPLAINTS: tuple[State, ...] = ("fail", "warn")
FORMAT = 1
"""Version of the JSON; increases when keys change."""


@dataclass(frozen=True)
class Finding:
    """One fact, and the remedy if it is a problem. `ok`: as it should be; `note`: information;
    `warn`: works with limits; `fail`: does not work."""

    name: str
    """For programs: `<check>.<part>`. Does not depend on the result."""
    state: State
    what: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.state in COMPLAINTS and not self.remedy:
            raise ValueError(f"{self.name} complains and names no remedy: {self.what}")


def healthy(findings: Iterable[Finding]) -> bool:
    return all(finding.state != "fail" for finding in findings)


def by_severity(findings: Sequence[Finding]) -> list[Finding]:
    """Worst first, then in the order of the checks."""
    return sorted(findings, key=lambda finding: STATES.index(finding.state))


def as_json(findings: Sequence[Finding], *, model: str | None, version: str) -> dict[str, Any]:
    """`format`, `version`, `model`, `healthy`, `findings` with the record's fields."""
    return {
        "format": FORMAT,
        "version": version,
        "model": model,
        "healthy": healthy(findings),
        "findings": [asdict(finding) for finding in by_severity(findings)],
    }
