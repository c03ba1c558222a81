"""What a check is, and how its own failure becomes a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ..errors import MLXProviderError
from ..isolation import Isolation
from .findings import Finding
from .subject import Subject


@dataclass(frozen=True)
class Check:
    name: str
    look: Callable[[Subject], Iterable[Finding]]
    """Changes nothing on the machine. May raise anything."""
    remedy: str
    """The remedy if the check raises. The error is the summary."""
    of_model: bool = False
    """It needs a model."""
    thorough: bool = False
    """It starts processes."""


def run(check: Check, subject: Subject) -> Iterator[Finding]:
    """The findings of a check. An error of the check is one more finding."""
    with Isolation(generator=True) as trying:
        yield from check.look(subject)
    if trying.fault is not None:
        error = trying.fault.error
        told = error.message if isinstance(error, MLXProviderError) else trying.fault.summary
        yield Finding(check.name, "fail", told, check.remedy)
