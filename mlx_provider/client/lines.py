"""The lines of a reply that goes on: for a thread that waits, and for an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from ..errors import EngineUnavailable

Run = Callable[[Coroutine[Any, Any, bytes | None]], "Future[bytes | None]"]
"""Has work done in the loop that owns the connections."""


class Lines:
    """Read it with `for` or with `async for`; `close` it where you stop before its end.

    Each is without its newline. Raises the errors of the reply: typed ones, `EngineUnavailable`
    where nobody answers, `EngineDied` where it is cut off.
    """

    def __init__(self, run: Run, source: AsyncGenerator[bytes, None]) -> None:
        self._run = run
        self._source = source

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> bytes:
        future = self._run(self._line())
        try:
            line = future.result()
        finally:
            future.cancel()
        if line is None:
            raise StopIteration
        return line

    def __aiter__(self) -> Lines:
        return self

    async def __anext__(self) -> bytes:
        line = await asyncio.wrap_future(self._run(self._line()))
        if line is None:
            raise StopAsyncIteration
        return line

    def close(self) -> None:
        """End the reply: does not wait for it. Idempotent."""
        try:
            self._run(self._end())
        except EngineUnavailable:  # its client was closed, and all its replies with it
            return

    async def _line(self) -> bytes | None:
        return await anext(self._source, None)

    async def _end(self) -> None:
        await self._source.aclose()
