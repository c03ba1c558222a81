"""Heartbeats in a stream without output, in the form of each route.

Chat: an empty delta, which the stream makes itself. The bridges of the other routes drop it
(1.106.2 and 1.109.1, `LiteLLMCompletionStreamingIterator`, `AnthropicStreamWrapper`), and the
router holds the first events of a response until there is output (`_responses_stream_holds_event`),
so there heartbeats are added after both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from typing import Any, Literal, Protocol

from litellm.constants import STREAM_SSE_KEEPALIVE_PING_BYTES
from litellm.responses.litellm_completion_transformation.streaming_iterator import (
    LiteLLMCompletionStreamingIterator,
)

from .logged import with_ending
from .operator import operator_options

LATER = 0.25
"""Other routes wait these seconds longer, because the first chunk of chat brings the id of the
response."""
ANNOUNCEMENT = ("response.created", "response.in_progress")


def heartbeat(litellm_params: Mapping[str, Any]) -> float | None:
    """Seconds of silence before a heartbeat; `None`: no heartbeats, as in a script."""
    if not litellm_params.get("proxy_server_request"):
        return None
    return operator_options(litellm_params).heartbeat or None


def alive(
    chunks: AsyncIterator[Any], route: str, litellm_params: Mapping[str, Any], logging: Any
) -> AsyncIterator[Any]:
    """Adds heartbeats where bridges drop those of chat, and the ending of a message."""
    wanted = operator_options(litellm_params).heartbeat
    seconds = wanted + LATER if wanted else None
    source = getattr(chunks, "_billing_source", chunks)
    if route.endswith("/messages"):
        return beating(chunks, seconds, Pings(logging))
    if isinstance(source, LiteLLMCompletionStreamingIterator):
        return closing(beating(chunks, seconds, Announcements(source)), source)
    return chunks


class Signs(Protocol):
    def beat(self) -> Iterable[Any]:
        """The events of one heartbeat."""

    def forward(self, chunk: Any) -> Any:
        """The chunk to send; `None`: a heartbeat has replaced it."""


class Pings:
    """As LiteLLM writes them (1.106.2), but less often."""

    def __init__(self, logging: Any = None) -> None:
        self._logging = logging

    def beat(self) -> Iterable[Any]:
        return (STREAM_SSE_KEEPALIVE_PING_BYTES,)

    def forward(self, chunk: Any) -> Any:
        return with_ending(self._logging, chunk)


class Announcements:
    """First events of the Responses API. A response is announced once, here or by the bridge."""

    def __init__(self, source: LiteLLMCompletionStreamingIterator) -> None:
        self._source = source
        self._announced: Literal["", "by us", "by the bridge"] = ""

    def beat(self) -> Iterable[Any]:
        if not self._announced:
            self._announced = "by us"
            yield self._source.create_response_created_event()
        yield self._source.create_response_in_progress_event()

    def forward(self, chunk: Any) -> Any:
        if getattr(chunk, "type", None) not in ANNOUNCEMENT:
            return chunk
        self._announced = self._announced or "by the bridge"
        return chunk if self._announced == "by the bridge" else None


async def beating(
    chunks: AsyncIterator[Any], seconds: float | None, signs: Signs
) -> AsyncGenerator[Any, None]:
    coming = asyncio.ensure_future(anext(chunks))
    try:
        while True:
            await asyncio.wait({coming}, timeout=seconds)
            if not coming.done():
                for event in signs.beat():
                    yield event
                continue
            try:
                chunk = coming.result()
            except StopAsyncIteration:
                return
            sent = signs.forward(chunk)
            if sent is not None:
                yield sent
            coming = asyncio.ensure_future(anext(chunks))
    finally:
        await _let_go(coming)


async def closing(
    chunks: AsyncGenerator[Any, None], source: LiteLLMCompletionStreamingIterator
) -> AsyncGenerator[Any, None]:
    """Closes `source` when this generator is closed. Neither Starlette 1 nor LiteLLM's stream
    (1.106.2 and 1.109.1), which has no `aclose`, does so if a client leaves while a chunk is sent:
    the request would run until the next garbage collection."""
    try:
        async for chunk in chunks:
            yield chunk
    finally:
        await chunks.aclose()
        await source.litellm_custom_stream_wrapper.aclose()


async def _let_go(coming: asyncio.Future[Any]) -> None:
    coming.cancel()
    await asyncio.wait({coming})
    if not coming.cancelled():
        coming.exception()
