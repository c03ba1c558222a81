"""When a request is sent again: whoever got it was no engine yet, or no longer, and took nothing.

Three signs tell so. Nobody listens; the engine refuses because it is ending; the connection is
lost at once, before any answer. All else is the request's own end, which is never repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ..errors import EngineDied, EngineUnavailable, MLXProviderError
from .address import Address

T = TypeVar("T")

PAUSES = (0.0, 0.2, 1.0)
"""Seconds before each further try."""
GOING_DOWN = 0.25
"""Seconds within which a connection lost before any answer means: the engine was just ending."""


class NotTaken(Exception):
    """The engine did not take the request, which may be sent again; `error` says why."""

    def __init__(self, error: EngineUnavailable) -> None:
        super().__init__(error.message)
        self.error = error


def unreachable(address: Address, error: Exception) -> NotTaken:
    return NotTaken(EngineUnavailable(f"no engine answers at {address}: {error}"))


def refused(error: MLXProviderError) -> Exception:
    """The engine answered so; one that is ending does it with exactly this class."""
    return NotTaken(error) if type(error) is EngineUnavailable else error


def lost(error: Exception, unanswered: float | None) -> Exception:
    """A connection broke, `unanswered` seconds after it was made; `None`: after an answer."""
    died = EngineDied(f"the engine ended while it held this request: {error}")
    going_down = unanswered is not None and unanswered < GOING_DOWN
    return NotTaken(died) if going_down else died


def patiently(work: Callable[[], T]) -> T:
    """Try again while an engine is found that is just ending; its end takes a few seconds."""
    for pause in PAUSES:
        try:
            return work()
        except NotTaken:
            time.sleep(pause)
    return last_try(work)


def last_try(work: Callable[[], T]) -> T:
    """The last try: what was not taken now is an error."""
    try:
        return work()
    except NotTaken as failure:
        raise failure.error from None
