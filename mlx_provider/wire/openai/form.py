"""The form in which a client wants an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from .best_of import BestOf
from .custom_tools import names_of
from .prompts import best_of


@dataclass(frozen=True)
class AnswerForm:
    legacy: bool = False
    """Sends `functions` in place of `tools`."""
    text: bool = False
    """From `/completions`."""
    timings: bool = False
    best_of: BestOf | None = None
    custom: frozenset[str] = frozenset()

    @classmethod
    def of(cls, values: Mapping[str, Any], *, text: bool) -> Self:
        """Raises `BadRequest` for a wrong `best_of`."""
        best = best_of(values) if text else None
        custom = names_of(values.get("tools"))
        return cls("functions" in values, text, values.get("timings") is True, best, custom)
