"""Trying, while a model is loaded, what it may not be able to do."""

from __future__ import annotations

from collections.abc import Callable

from ..isolation import Isolation


def failure(trial: Callable[[], str]) -> str:
    """What `trial` finds wrong, or what stopped it, in one line; empty: nothing is wrong.

    A model's code may raise anything. Here that is an answer, and loading goes on.
    """
    with Isolation() as tried:
        return trial()
    return "" if tried.fault is None else tried.fault.summary
