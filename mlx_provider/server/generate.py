"""`POST` of a request to a model: from its body to its last event."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..byte_gate import Ticket
from ..errors import MLXProviderError, RequestFailed
from ..protocol.event_queue import EventQueue
from ..protocol.events import EVENT_BATCH, Accepted, Event, Failed
from ..protocol.requests import ModelRequest
from ..serving.interface import Service
from ..upstream.heap import give_back
from .access import error_response
from .incoming import Incoming

SUBMITTING = 1024
"""Requests in `submit` at once (validation, templates, loading of a model)."""
LARGE = 4 * 2**20
"""Bytes of a body above which free memory is returned to the system."""
NDJSON = "application/x-ndjson"


class Generate:
    """ASGI endpoint. One instance per kind of request, and a `_Reply` per request."""

    def __init__(
        self,
        service: Service,
        incoming: Incoming,
        stopping: anyio.Event,
        *,
        kind: type[ModelRequest],
        why: Callable[[], MLXProviderError],
    ) -> None:
        """`kind`: type of the body. `why`: the error for requests after the stop."""
        self._why = why
        self._kind = kind
        self._service = service
        self._incoming = incoming
        self._stopping = stopping
        self._limiter = anyio.CapacityLimiter(SUBMITTING)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            request, ticket = await self._incoming.read(scope, receive, self._kind)
        except ClientDisconnect:
            return
        large = ticket.size > LARGE
        reply = _Reply(self._service, self._limiter, self._stopping, self._why, request, ticket)
        del request  # frees its images and texts as soon as they are prepared
        with self._incoming.activity.serving(reply.queue):
            await reply.run(scope, receive, send)
        if large:
            await anyio.to_thread.run_sync(give_back)


class _Reply:
    def __init__(
        self,
        service: Service,
        limiter: anyio.CapacityLimiter,
        stopping: anyio.Event,
        why: Callable[[], MLXProviderError],
        request: ModelRequest,
        ticket: Ticket,
    ) -> None:
        self.queue = EventQueue()
        self._service = service
        self._limiter = limiter
        self._stopping = stopping
        self._why = why
        self._id = request.id
        self._unsent: tuple[ModelRequest, Ticket] | None = (request, ticket)
        self._submitting = anyio.CancelScope()
        self._refused = False

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request. If the client disconnects, the request is cancelled in any phase."""
        failure: MLXProviderError | None = None
        try:
            async with anyio.create_task_group() as watchers:
                watchers.start_soon(self._watch_client, receive, watchers)
                watchers.start_soon(self._watch_stop)
                try:
                    await self._stream(await self._accept(), send)
                except MLXProviderError as error:
                    # its frames hold the whole request, and this frame would hold them
                    failure = error.with_traceback(None)
                watchers.cancel_scope.cancel()
        finally:
            self._leave()
        if failure is not None:
            closing = {"connection": "close"} if self._stopping.is_set() else None
            await error_response(failure, closing)(scope, receive, send)

    async def _watch_client(self, receive: Receive, group: TaskGroup) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        group.cancel_scope.cancel()

    async def _watch_stop(self) -> None:
        await self._stopping.wait()
        self._submitting.cancel()

    async def _accept(self) -> Accepted:
        """Submit in a thread. Abandoned when the engine stops; the thread then cleans up."""
        with self._submitting:
            try:
                return await anyio.to_thread.run_sync(
                    self._submit, limiter=self._limiter, abandon_on_cancel=True
                )
            except MLXProviderError:
                if (
                    not self.queue.ended
                ):  # otherwise the end of the engine ended it, which is the reason
                    raise
        raise self._why()

    def _submit(self) -> Accepted:
        unsent, self._unsent = self._unsent, None
        if unsent is None:
            raise RequestFailed.cancelled()
        request, ticket = unsent
        del unsent
        try:
            with ticket:
                return self._service.submit(request, self.queue)
        except MLXProviderError:
            self._refused = True
            raise

    def _leave(self) -> None:
        """End everything that the engine still does for this request, even if `submit` still
        runs."""
        unsent, self._unsent = self._unsent, None
        if unsent is not None:  # never submitted, so another request may have its id
            unsent[1].close()
        elif not self._refused and not self.queue.ended:
            self.queue.put([Failed.of(RequestFailed.cancelled())])
            self._service.cancel(self._id)

    async def _stream(self, accepted: Accepted, send: Send) -> None:
        """Write one line per wake-up. While `send` waits for a slow reader, events are joined."""
        head = Response(status_code=200, media_type=NDJSON)
        del head.headers["content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": head.raw_headers})
        events: list[Event] = [accepted]
        while events:
            line = EVENT_BATCH.dump_json(events) + b"\n"
            await send({"type": "http.response.body", "body": line, "more_body": True})
            events = await self.queue.aget()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
