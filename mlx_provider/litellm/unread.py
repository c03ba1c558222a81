"""A coroutine that nobody need await.

LiteLLM makes an answer's coroutine in an executor thread and awaits it in its event loop (1.106.2
`main.py::acompletion`). Where the client leaves meanwhile, the loop never gets it: a coroutine of
Python's own would say on the error output that it was never awaited, and what records warnings
would hold it, and the engine's request with it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from functools import cached_property
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class Unread(Coroutine[Any, Any, T]):
    """The coroutine that `begin` makes, made once somebody awaits it."""

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._begin = begin

    @cached_property
    def _begun(self) -> Coroutine[Any, Any, T]:
        return self._begin()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._begun.__await__()

    def send(self, value: Any) -> Any:
        """As a coroutine's own."""
        return self._begun.send(value)

    def throw(
        self,
        kind: Any,
        value: BaseException | object = None,
        traceback: TracebackType | None = None,
    ) -> Any:
        """As a coroutine's own."""
        return self._begun.throw(kind, value, traceback)

    def close(self) -> None:
        """As a coroutine's own."""
        self._begun.close()
