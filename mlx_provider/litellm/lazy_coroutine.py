"""A coroutine that need not be awaited. LiteLLM makes the coroutine in an executor thread and
awaits it in its event loop (1.106.2 `main.py::acompletion`). If the client leaves in between,
Python would warn, and keep the coroutine and the engine's request alive."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from functools import cached_property
from typing import Any, TypeVar

T = TypeVar("T")


class LazyCoroutine(Coroutine[Any, Any, T]):
    """`begin` makes the coroutine at the first await."""

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._begin = begin

    @cached_property
    def _coroutine(self) -> Coroutine[Any, Any, T]:
        return self._begin()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()
