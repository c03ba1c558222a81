"""The newest answer of the engine thread, for whoever must not wait for it long."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet
from typing import Generic, TypeVar

from ..errors import EngineDied

T = TypeVar("T")


class Latest(Generic[T]):
    """One question at a time is on its way. Any thread; who races with another asks once more."""

    def __init__(self, ask: Callable[[], Future[T]], first: T) -> None:
        """`first`: what is told before there is any answer."""
        self._ask = ask
        self._told = first
        self._asked: Future[T] | None = None

    def get(self, patience: float) -> T:
        """The answer, or the last one where it takes longer than `patience` seconds."""
        try:
            asked = self._asked = self._asked or self._ask()
        except EngineDied:  # it is shutting down
            return self._told
        try:
            self._told = asked.result(patience)
        except (NotYet, EngineDied, CancelledError):  # where it died, another one is asked next
            return self._told
        finally:
            if asked.done():
                self._asked = None
        return self._told
