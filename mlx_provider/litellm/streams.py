"""Readers of one accepted request: whole or as a stream, blocking or in an event loop. Streams are
classes, because a generator that was never started would not run its `finally`.

The heartbeat of chat is an empty delta. The bridges of the other routes drop it (1.106.2 and
1.109.1), so there heartbeats are added after them."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, Self

from litellm.constants import STREAM_SSE_KEEPALIVE_PING_BYTES
from litellm.responses.litellm_completion_transformation.streaming_iterator import (
    LiteLLMCompletionStreamingIterator,
)
from litellm.types.utils import ModelResponseStream

from ..client.generation import Generation
from ..errors import EngineDied, RequestTimedOut
from ..protocol.events import Event, Finish
from ..wire import api
from ..wire.api import ClientNames
from ..wire.openai.answer import Whole
from ..wire.openai.request import AnswerForm
from ..wire.openai.routes import Embeddings
from .call import Deadline, with_ending
from .errors import LiteLLMErrors
from .objects import ChunkStream, fill

SILENCE = 5.0
"""Seconds before a heartbeat."""
LATER = 0.25
"""More seconds on other routes, because the first chunk of chat brings the id of the response."""
ANNOUNCEMENT = ("response.created", "response.in_progress")


def complete_stream(chunks: AsyncIterator[Any], route: str, logging: Any) -> AsyncIterator[Any]:
    """Adds heartbeats where bridges drop those of chat, and the ending of a message."""
    seconds = SILENCE + LATER
    if route.endswith("/messages"):  # as LiteLLM writes them (1.106.2), but less often
        ping = (STREAM_SSE_KEEPALIVE_PING_BYTES,)
        return add_heartbeats(chunks, seconds, lambda: ping, partial(with_ending, logging))
    source = getattr(chunks, "_billing_source", chunks)
    if isinstance(source, LiteLLMCompletionStreamingIterator):
        first = Announcements(source)
        return add_heartbeats(chunks, seconds, first.beat, first.forward)
    return chunks


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


async def add_heartbeats(
    chunks: AsyncIterator[Any],
    seconds: float | None,
    beat: Callable[[], Iterable[Any]],
    forward: Callable[[Any], Any],
) -> AsyncGenerator[Any, None]:
    """`beat`: events after `seconds` of silence. `forward`: the chunk to send; `None`: nothing."""
    coming = asyncio.ensure_future(anext(chunks))
    try:
        while True:
            await asyncio.wait({coming}, timeout=seconds)
            if not coming.done():
                for event in beat():
                    yield event
                continue
            try:
                chunk = coming.result()
            except StopAsyncIteration:
                return
            if (sent := forward(chunk)) is not None:
                yield sent
            coming = asyncio.ensure_future(anext(chunks))
    finally:
        coming.cancel()
        await asyncio.wait({coming})
        if not coming.cancelled():
            coming.exception()


class Reply:
    """An accepted request in the engine. As a context, it cancels the request after an error."""

    def __init__(
        self,
        generation: Generation,
        deadline: Deadline,
        model: str,
        form: AnswerForm = AnswerForm(),  # noqa: B008  (frozen)
        names: ClientNames | None = None,
        finished: Callable[[Finish], None] | None = None,
        encoding: str | None = None,
    ) -> None:
        """`names`: the client's names of parameters, for a late error. `finished` is called when
        the first choice ends. `encoding`: of vectors; `None`: the reply is a text."""
        self.generation = generation
        self.deadline = deadline
        self.model = model
        self.form = form
        self._names = names or ClientNames()
        self._finished = finished
        self._encoding = encoding

    def collect(self, response: Any) -> Any:
        with LiteLLMErrors(self.model), self:
            whole = self._whole()
            while (body := whole.body(events := self.events())) is None:
                pass
            return self._fill(response, body, events[-1])

    async def acollect(self, response: Any) -> Any:
        with LiteLLMErrors(self.model), self:
            whole = self._whole()
            while (body := whole.body(events := await self.aevents())) is None:
                pass
            return self._fill(response, body, events[-1])

    def _whole(self) -> api.Whole:
        accepted = self.generation.accepted
        encoding = self._encoding
        return Whole(accepted, self.form) if encoding is None else Embeddings(accepted, encoding)

    def _fill(self, response: Any, body: Mapping[str, Any], done: Any) -> Any:
        return fill(response, self.model, body, done, self.generation.accepted.warnings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        if error is not None:  # cancellation, too
            self.generation.close()

    def events(self) -> list[Event]:
        """Raises `RequestTimedOut` at the deadline, `EngineDied` past the end."""
        try:
            return self._read(self.generation.get(self.deadline.left()))
        except RequestTimedOut:
            raise self.deadline.passed() from None

    async def aevents(self, silence: float | None = None) -> list[Event]:
        """As `events`; an empty list after `silence` seconds without an event."""
        left = self.deadline.left()
        within = min((each for each in (left, silence) if each is not None), default=None)
        try:
            return self._read(await self.generation.aget(within))
        except RequestTimedOut:
            if within == left:
                raise self.deadline.passed() from None
            return []

    def _read(self, events: list[Event]) -> list[Event]:
        if not events:
            raise EngineDied("the engine ended the stream early")
        for event in events:
            if self._finished is not None and isinstance(event, Finish) and event.index == 0:
                self._finished(event)
        return self._names.events(events)


class ReplyStream:
    """Errors are LiteLLM's; each frees the request, as does the cancellation of a reader. In a
    loop, an empty chunk is sent after `heartbeat` silent seconds."""

    def __init__(self, reply: Reply, heartbeat: float | None = None) -> None:
        self._reply = reply
        self._heartbeat = heartbeat
        self.mlx_created = int(time.time())  # see `patches.CREATED`
        self._chunks = ChunkStream(
            reply.generation.accepted.id, reply.model, self.mlx_created, reply.form
        )
        self._waiting: Iterator[ModelResponseStream] = iter(())
        self._closed = False

    def __iter__(self) -> Self:
        return self

    __aiter__ = __iter__

    def __next__(self) -> ModelResponseStream:
        with LiteLLMErrors(self._reply.model), self._reply:
            while (chunk := self._ready(StopIteration)) is None:
                self._waiting = self._chunks.feed(self._reply.events())
            return chunk

    async def __anext__(self) -> ModelResponseStream:
        with LiteLLMErrors(self._reply.model), self._reply:
            while (chunk := self._ready(StopAsyncIteration)) is None:
                events = await self._reply.aevents(self._heartbeat)
                if not events:
                    return self._chunks.empty()
                self._waiting = self._chunks.feed(events)
            return chunk

    def _ready(self, end: type[Exception]) -> ModelResponseStream | None:
        chunk = next(self._waiting, None)
        if chunk is None and (self._closed or self._chunks.ended):
            raise end
        return chunk

    def close(self) -> None:
        self._closed = True
        self._waiting = iter(())
        self._reply.generation.close()

    async def aclose(self) -> None:
        self.close()


async def refuse(error: Exception) -> AsyncGenerator[Any, None]:
    raise error
    yield  # makes it a generator
