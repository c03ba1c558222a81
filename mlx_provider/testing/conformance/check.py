"""Checks and their failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S")


class Nonconformity(AssertionError):
    """A promise is not kept; the message says how."""


class NotApplicable(Exception):
    """A check does not apply; the message says why."""


@dataclass(frozen=True)
class Check(Generic[S]):
    name: str
    promise: str
    run: Callable[[S], None]
    """Raises `Nonconformity`, `NotApplicable`, or what the plugin raises."""


@dataclass(frozen=True)
class Case:
    subject: str
    """`plugin`, or kind and name of a record."""
    variant: str
    """Checkpoint and format of a model."""
    check: str
    promise: str
    run: Callable[[], None]


def demand(kept: bool, summary: str) -> None:
    if not kept:
        raise Nonconformity(summary)


def same(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise Nonconformity(f"{what}\n  expected: {_short(expected)}\n  found:    {_short(found)}")


def _short(value: object, longest: int = 600) -> str:
    text = repr(value)
    return text if len(text) <= longest else f"{text[:longest]}…"
