"""A script in a message, and how it is found there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

BEGIN, END = "SCRIPT: ", " :END"
WRITTEN = re.compile(r"SCRIPT:(.*?):END", re.DOTALL)


class BadScript(ValueError):
    """The text between the marks is not a list of steps."""


@dataclass(frozen=True)
class Call:
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """One reply; see the package for its fields."""

    say: str = ""
    calls: tuple[Call, ...] = ()
    think: str = ""
    count: int = 0
    slow: float = 0.0
    prefill: float = 0.0
    since: float = 0.0

    @property
    def text(self) -> str:
        """Without reasoning and calls."""
        return self.say + " ".join(map(str, range(1, self.count + 1)))

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Step:
        """From JSON. Raises `BadScript`."""
        try:
            calls = tuple(Call(**call) for call in fields.get("calls", ()))
            return cls(**{**fields, "calls": calls})
        except TypeError as error:
            raise BadScript(str(error)) from None


def script(*steps: Step) -> str:
    return BEGIN + json.dumps([_encoded(step) for step in steps]) + END


def _encoded(step: Step) -> dict[str, Any]:
    return {name: value for name, value in asdict(step).items() if value}


def steps_in(text: str) -> tuple[Step, ...] | None:
    """The last script in a text; `None`: it has none. Raises `BadScript`."""
    found = WRITTEN.findall(text)
    return tuple(Step.read(each) for each in _steps(found[-1])) if found else None


def without_script(text: str) -> str:
    return WRITTEN.sub("", text)


def _steps(written: str) -> Iterable[Mapping[str, Any]]:
    """JSON; or JSON inside a JSON string, as clients that quote a message leave it."""
    for reading in (json.loads, _unquoted):
        try:
            steps = reading(written)
        except ValueError:
            continue
        if isinstance(steps, list) and all(isinstance(each, dict) for each in steps):
            return steps
    raise BadScript(f"no JSON list of steps: {written[:200]!r}")


def _unquoted(written: str) -> Any:
    return json.loads(json.loads(f'"{written}"'))
