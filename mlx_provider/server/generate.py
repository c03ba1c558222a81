"""The endpoints of requests to a model: `Generate` sends the events of a reply, `Count` only counts
or shows the tokens of the prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ..byte_gate import Ticket
from ..client.generation import Generation, submit_all
from ..errors import (
    BadRequest,
    EngineUnavailable,
    MLXProviderError,
    RequestFailed,
    RequestTimedOut,
    for_another,
)
from ..protocol.event_queue import EventQueue
from ..protocol.events import Accepted, Event, Failed
from ..protocol.requests import GenerateRequest, ModelRequest
from ..upstream.runtime import trim_heap
from ..wire.api import HEADER, ParsedRequest, ResponseWriter, header_text
from .access import error_response, key_name
from .incoming import Incoming, Parse, in_thread

if TYPE_CHECKING:
    from ..serving.service import ChatService


LARGE = 4 * 2**20  # bytes of a body after which free memory is returned to the system
HEARTBEAT = 5.0  # seconds of silence after which a stream has a comment
LONG_LOAD = 10.0  # seconds after which a stream reports the load of its model


@dataclass(frozen=True)
class Count:
    """ASGI endpoint that responds with a JSON object, which `_answer` makes of the request."""

    _incoming: Incoming
    _parse: Parse
    _answer: Callable[[GenerateRequest], dict[str, Any]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            parsed, ticket = await self._incoming.read(scope, receive, self._parse)
        except ClientDisconnect:
            return
        with ticket, self._incoming.activity.serving(EventQueue()):
            answer = await in_thread(partial(self._make_answer, parsed), self._incoming.threads)
        await JSONResponse(answer)(scope, receive, send)

    def _make_answer(self, parsed: ParsedRequest) -> dict[str, Any]:
        with parsed.names.naming():
            requests: Sequence[Any] = parsed.requests
            if len(requests) != 1:
                raise BadRequest("prompt must be one text or list of token ids", param="prompt")
            return self._answer(requests[0])


@dataclass(frozen=True)
class Generate:
    """ASGI endpoint that submits a request and responds with its events."""

    _service: ChatService
    _incoming: Incoming
    _stopping: anyio.Event
    _parse: Parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            parsed, ticket = await self._incoming.read(scope, receive, self._parse)
        except ClientDisconnect:
            return
        large = ticket.size > LARGE
        answer = _Answer(self._service, self._incoming.threads, self._stopping, parsed, ticket)
        del parsed  # frees its images and texts as soon as they are prepared
        with ExitStack() as serving:
            for queue in answer.queues:
                serving.enter_context(self._incoming.activity.serving(queue, key_name(scope)))
            await answer.run(scope, receive, send)
        if large:
            await anyio.to_thread.run_sync(trim_heap)


class _Answer:
    def __init__(
        self,
        service: ChatService,
        limiter: anyio.CapacityLimiter,
        stopping: anyio.Event,
        parsed: ParsedRequest,
        ticket: Ticket,
    ) -> None:
        self.queues = [EventQueue() for _ in parsed.requests]
        self._service = service
        self._limiter = limiter
        self._stopping = stopping
        self._ids = [request.id for request in parsed.requests]
        self._model = parsed.requests[0].model
        self._parsed = replace(parsed, requests=())
        self._unsent: tuple[list[ModelRequest], Ticket] | None = (list(parsed.requests), ticket)
        self._submitting, self._sending = anyio.CancelScope(), anyio.Lock()
        self._decided = False  # whether the request was accepted or refused
        self._early: ResponseWriter | None = None  # a stream that has begun before this
        self._submitted = 0  # requests that were submitted

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure: MLXProviderError | None = None
        generation: Generation | None = None
        try:
            async with anyio.create_task_group() as watchers:
                watchers.start_soon(self._watch_client, receive, watchers)
                watchers.start_soon(self._watch_stop)
                watchers.start_soon(self._announce_load, send)
                try:
                    try:
                        generation = await self._accept()
                    finally:
                        async with self._sending:  # nothing of the load is half written
                            self._decided = True
                    await self._write(generation, send)
                except MLXProviderError as error:
                    # its frames hold the whole request, and this frame would hold them
                    failure = for_another(error)
                watchers.cancel_scope.cancel()
        finally:
            self._leave()
            if generation is not None:
                generation.close()
        if failure is not None:
            response = self._failure_response(failure, scope["path"])
            if self._early is not None:
                await send({"type": "http.response.body", "body": response.body})
            else:
                await response(scope, receive, send)

    def _failure_response(self, failure: MLXProviderError, path: str) -> Response:
        """An event of the stream if that has begun or is to report it, else an HTTP error."""
        in_stream = isinstance(failure, self._parsed.in_stream)
        reply = self._early or (self._make_reply() if in_stream else None)
        if reply is not None and reply.heartbeat:
            frames = reply.feed([Failed.of(failure)])
            return Response(frames, media_type=reply.media_type)
        closing = {"connection": "close"} if self._stopping.is_set() else None
        return error_response(failure, closing, path)

    async def _watch_client(self, receive: Receive, group: TaskGroup) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        group.cancel_scope.cancel()

    async def _watch_stop(self) -> None:
        await self._stopping.wait()
        self._submitting.cancel()

    async def _announce_load(self, send: Send) -> None:
        """Begin the stream of a request that waits long for the load of its model, with comments on
        that. An error then comes in the stream, without its HTTP status."""
        began = time.monotonic()
        await anyio.sleep(LONG_LOAD)
        reply = self._make_reply()
        while reply.heartbeat:
            async with self._sending:
                if self._decided:
                    return
                loading = self._service.loading(self._model)
                if loading and self._early is None:
                    await send(_start(reply, []))
                    self._early = reply
                if self._early is not None:
                    text = header_text([f"loading: {loading} ({time.monotonic() - began:.0f} s)"])
                    body = f": {text}\n\n".encode() if loading else reply.heartbeat
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            await anyio.sleep(HEARTBEAT)

    def _make_reply(self) -> ResponseWriter:
        """A writer for frames before the request is accepted."""
        unknown = Accepted(id=self._ids[0], model=self._model, prompt_tokens=0, max_tokens=0)
        return self._parsed.reply(unknown)

    async def _accept(self) -> Generation:
        """Submits in a thread. Abandoned when the engine stops; the thread then cleans up."""
        with self._parsed.names.naming(), self._submitting:
            return await in_thread(self._submit_all, self._limiter, abandon_on_cancel=True)
        raise EngineUnavailable("the engine is stopping")

    def _submit_all(self) -> Generation:
        unsent, self._unsent = self._unsent, None
        if unsent is None:
            raise RequestFailed.cancellation()
        requests, ticket = unsent
        del unsent
        with ticket:
            if self._parsed.joined:
                return submit_all(self._submit, requests)
            return self._submit(requests[0])

    def _submit(self, request: ModelRequest) -> Generation:
        queue = self.queues[self._submitted]
        if queue.ended:  # the client left while the prompt before it was prepared
            raise RequestFailed.cancellation()
        self._submitted += 1
        try:
            accepted = self._service.submit(request, queue)
        except MLXProviderError:
            self._submitted -= 1
            raise
        return Generation(accepted, queue, partial(self._service.cancel, accepted.id))

    def _leave(self) -> None:
        """Cancel all work for this request, even while `submit` runs."""
        unsent, self._unsent = self._unsent, None
        if unsent is not None:  # never submitted, so another request may have its id
            unsent[1].close()
            return
        for index, queue in enumerate(self.queues):
            if not queue.ended:
                queue.put([Failed.of(RequestFailed.cancellation())])
                if index < self._submitted:
                    self._service.cancel(self._ids[index])

    async def _write(self, generation: Generation, send: Send) -> None:
        """Send the reply, with heartbeats after silence. Events wait and are joined while `send`
        waits for a slow reader."""
        accepted, names = generation.accepted, self._parsed.names
        reply = self._parsed.reply(accepted)
        started, written = self._early is not None, time.monotonic()
        events: list[Event] = [accepted]
        while events:
            out = reply.feed(events)
            if not started and (out or reply.streamed):
                await send(_start(reply, [*map(names.text, accepted.warnings)]))
                started, written = True, time.monotonic()
            while True:
                if out:
                    await send({"type": "http.response.body", "body": out, "more_body": True})
                    written = time.monotonic()
                beat = written + HEARTBEAT
                wait = max(0.0, beat - time.monotonic()) if reply.heartbeat else None
                try:
                    events = names.events(await generation.aget(wait))
                    break
                except RequestTimedOut:
                    out = reply.heartbeat
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _start(reply: ResponseWriter, warnings: list[str]) -> dict[str, object]:
    head = Response(status_code=200, media_type=reply.media_type)
    del head.headers["content-length"]
    if warnings:
        head.headers[HEADER] = header_text(warnings)
    return {"type": "http.response.start", "status": 200, "headers": head.raw_headers}
