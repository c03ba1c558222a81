"""Tries at load features that a model may not support."""

from __future__ import annotations

from collections.abc import Callable

from ..isolation import Isolation


def failure(trial: Callable[[], str]) -> str:
    """The problem that `trial` finds, or the error that stopped it, in one line. Empty: none. A
    model's code may raise anything."""
    with Isolation() as tried:
        return trial()
    return "" if tried.fault is None else tried.fault.summary
