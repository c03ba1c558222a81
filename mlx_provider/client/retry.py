"""Decides when a request is sent again: only if no running engine has accepted it.

That is so if no process listens, if the engine refuses because it is ending, or if the connection
is lost at once, before any answer. All other failures end the request."""

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
"""Seconds: a connection lost earlier, without an answer, means that the engine was ending."""


class NotTaken(Exception):
    """The engine did not accept the request, which may be sent again."""

    def __init__(self, error: EngineUnavailable) -> None:
        super().__init__(error.message)
        self.error = error


def unreachable(address: Address, error: Exception) -> NotTaken:
    return NotTaken(EngineUnavailable(f"no engine answers at {address}: {error}"))


def refused(error: MLXProviderError) -> Exception:
    """An ending engine uses exactly this class."""
    return NotTaken(error) if type(error) is EngineUnavailable else error


def lost(error: Exception, unanswered: float | None) -> Exception:
    """`unanswered`: seconds since the connection was made. `None`: after an answer."""
    died = EngineDied(f"the engine ended while it held this request: {error}")
    going_down = unanswered is not None and unanswered < GOING_DOWN
    return NotTaken(died) if going_down else died


def patiently(work: Callable[[], T]) -> T:
    """Retry while an engine is ending (a few seconds)."""
    for pause in PAUSES:
        try:
            return work()
        except NotTaken:
            time.sleep(pause)
    return last_try(work)


def last_try(work: Callable[[], T]) -> T:
    try:
        return work()
    except NotTaken as failure:
        raise failure.error from None
