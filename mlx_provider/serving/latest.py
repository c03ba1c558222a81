"""The newest answer of the engine thread, for callers that must not wait long."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet
from typing import Generic, TypeVar

from ..errors import EngineDied

T = TypeVar("T")


class Latest(Generic[T]):
    """One call to the engine thread at a time. Safe from any thread; concurrent callers may cause a
    second call."""

    def __init__(self, ask: Callable[[], Future[T]], first: T) -> None:
        self._ask = ask
        self._told = first
        self._asked: Future[T] | None = None

    def get(self, patience: float) -> T:
        """The previous result if the answer takes longer than `patience` seconds."""
        try:
            asked = self._asked = self._asked or self._ask()
        except EngineDied:  # it is shutting down
            return self._told
        try:
            self._told = asked.result(patience)
        except (NotYet, EngineDied, CancelledError):  # the next call asks a new engine thread
            return self._told
        finally:
            if asked.done():
                self._asked = None
        return self._told
