"""Requests of one client to an engine. A thread reads each stream, so that any thread or event loop
may read its events. A request is sent again only if no engine can have accepted it: see `retry`."""

import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, TypeVar

import httpx
from pydantic import ValidationError

from ..errors import EngineDied, EngineUnavailable, MLXProviderError, RequestFailed
from ..isolation import attempt
from ..protocol.event_queue import EventQueue
from ..protocol.events import EVENT_BATCH, Accepted, Failed
from ..protocol.health import Health
from .generation import Generation
from .messages import Address, LineBuffer, error_of, parse_health

T = TypeVar("T")
PAUSES = (0.0, 0.2, 1.0)  # seconds before each further attempt
LOST_AT_ONCE = 0.25
"""Seconds. An engine that loses a connection sooner was ending and had not accepted the request."""
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 60.0
"""For an answer that needs no model, and for the first line of a connection that stays open. Others
have no limit: a model may load for minutes."""
CLOSE_SECONDS = 5.0  # for each thread to end when the client is closed
READ_AHEAD, READ_AGAIN_SECONDS = 2**18, 0.005
"""Bytes of unread events above which no more of a reply is read, and the time until a next look."""


def mark_unaccepted(error: EngineUnavailable) -> EngineUnavailable:
    error.maybe_accepted = False
    return error


def retry(work: Callable[[], T]) -> T:
    """Return what `work` returns. Repeat it while no engine accepts the request, thrice at most."""
    pauses = iter(PAUSES)
    while True:
        try:
            return work()
        except EngineUnavailable as error:
            pause = next(pauses, None)
            if error.maybe_accepted or pause is None:
                error.maybe_accepted = True  # so that an outer `retry` gives up, too
                raise
            time.sleep(pause)


class Stream:
    """One request with its own connection: in HTTP/1.1, only its end cancels a request. If a thread
    reads the reply, it calls `take` for each line, and then `end` once."""

    health: Health  # of the engine, if this is the connection of `Transport.attach`

    def __init__(self) -> None:
        self.first: Future[Any] = Future()  # the first line; empty: the reply ended without one
        self.close_error: MLXProviderError | None = None
        self._pid = os.getpid()
        self._socket: socket.socket | None = None

    def close(self, error: MLXProviderError | None = None) -> None:
        """`error`: raised to whoever waits; by default, that the request was cancelled. Idempotent,
        never blocks, safe from any thread. In a forked child, does nothing to the connection."""
        if os.getpid() == self._pid:
            self.close_error = self.close_error or error or RequestFailed.cancellation()
            self._shut()

    def trace(self, event: str, values: Mapping[str, Any]) -> None:
        """Called by httpx (extension `trace`): keeps the socket as soon as it is connected."""
        if event.endswith(("connect_unix_socket.complete", "connect_tcp.complete", "tls.complete")):
            self._socket = values["return_value"].get_extra_info("socket")
            if self.close_error:
                self._shut()

    def _shut(self) -> None:
        """Wakes the reading thread, which closes the socket. Not TLS's own `shutdown`: after it,
        that thread would read encrypted data."""
        if self._socket is not None:
            with suppress(OSError):  # the engine was first
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def take(self, line: bytes) -> None:
        if not self.first.done():
            self.first.set_result(line)

    def end(self, error: MLXProviderError | None) -> None:
        if error is None:
            self.take(b"")
        elif not self.first.done():
            self.first.set_exception(error)


class EventStream(Stream):
    """The reply of a generation. `first` is its event `Accepted`."""

    def __init__(self) -> None:
        super().__init__()
        self.events = EventQueue()

    def take(self, line: bytes) -> None:
        found = EVENT_BATCH.validate_json(line)
        if found and not self.first.done():
            if not isinstance(first := found.pop(0), Accepted):
                raise EngineUnavailable("the engine's first event is not 'accepted'")
            self.first.set_result(first)
        self.events.put(found)
        while self.events.unread > READ_AHEAD and not self.close_error:
            time.sleep(READ_AGAIN_SECONDS)

    def end(self, error: MLXProviderError | None) -> None:
        error = error or EngineDied("the engine's reply ended before its last event")
        super().end(error)
        self.events.put([Failed.of(error)])  # ignored after the last event


class Transport:
    """Safe from any thread and across `fork`: a child opens its own connections."""

    def __init__(self, address: Address, headers: Mapping[str, str]) -> None:
        self.address = address
        self._headers = {"content-type": "application/json", **headers}
        self._reset()
        forked = weakref.WeakMethod(self._reset)
        os.register_at_fork(after_in_child=lambda: (method := forked()) and method())

    def _reset(self) -> None:
        self.attaching = threading.Lock()  # of `HttpClient`, which attaches in one thread at a time
        self.attachment: Stream | None = None
        """The open connection by which engine and client notice each other's end."""
        self._threads: dict[Stream, threading.Thread | None] = {}
        """Running requests. `None`: the thread that asks reads the reply."""
        self.__dict__.pop("_http", None)

    @cached_property
    def _http(self) -> httpx.Client:
        url, path = self.address.url, self.address.socket
        return httpx.Client(
            base_url=url,
            headers=self._headers,
            transport=httpx.HTTPTransport(
                # loading the certificate store takes 20 ms
                verify=httpx.create_ssl_context() if url.startswith("https:") else False,
                uds=path,
                limits=httpx.Limits(max_keepalive_connections=0),
                socket_options=None if path else _keep_alive(),
            ),
        )

    def attach(self) -> Stream:
        """Open the connection `attachment`, and read `health` from it. Raises typed errors."""
        line, stream = self.hold("GET", "/v1/attach")
        try:
            stream.health = parse_health(line)
        except EngineUnavailable:
            stream.close()
            raise
        self.attachment = stream
        return stream

    def send(self, path: str, body: bytes) -> Generation:
        """Wait until the request is accepted. A thread reads the events. Raises typed errors."""
        stream = EventStream()
        return Generation(self._start(stream, "POST", path, body), stream.events, stream.close)

    def ask(
        self,
        method: str,
        path: str,
        ok: tuple[int, ...] = (200,),
        body: bytes = b"",
        seconds: float | None = ANSWER_SECONDS,
    ) -> bytes:
        """The whole reply, read in the calling thread. Raises typed errors."""
        stream = Stream()
        self._threads[stream] = None
        try:
            with self._response(stream, method, path, body, ok, seconds) as response:
                return response.read()
        finally:
            self._threads.pop(stream, None)

    def hold(self, method: str, path: str, body: bytes = b"") -> tuple[bytes, Stream]:
        """The first line of a reply (empty: none), and its connection, which a thread keeps open
        until one side ends it. Raises typed errors."""
        stream = Stream()
        try:
            return self._start(stream, method, path, body, ANSWER_SECONDS), stream
        except TimeoutError:
            raise _no_answer(ANSWER_SECONDS) from None
        except EngineDied as error:
            raise mark_unaccepted(error) from None  # the connection has no request

    def close(self) -> None:
        """Cancels running requests. A later one opens a new connection."""
        threads = dict(self._threads)
        for stream in threads:
            stream.close(EngineUnavailable("this client was closed"))
        for thread in threads.values():
            if thread is not None and thread.is_alive():  # else it cannot be joined yet
                thread.join(CLOSE_SECONDS)

    def _start(
        self, stream: Stream, method: str, path: str, body: bytes, seconds: float | None = None
    ) -> Any:
        """Read the reply in a thread. Returns its first line or event. Raises `TimeoutError`."""

        def read() -> None:
            with self._response(stream, method, path, body) as response:
                lines = LineBuffer()
                for piece in response.iter_raw():
                    for line in filter(None, lines.feed(piece)):
                        stream.take(line)

        def run() -> None:
            fault = attempt(read)
            stream.end(None if fault is None else fault.of_request("the request to the engine"))
            self._threads.pop(stream, None)

        thread = threading.Thread(target=run, name="mlx-provider client", daemon=True)
        self._threads[stream] = thread
        thread.start()
        try:
            return stream.first.result(seconds)
        except BaseException:  # Ctrl-C, too
            stream.close()
            raise

    @contextmanager
    def _response(
        self,
        stream: Stream,
        method: str,
        path: str,
        body: bytes,
        ok: tuple[int, ...] = (200,),
        seconds: float | None = None,
    ) -> Iterator[httpx.Response]:
        """A reply with one of the status codes `ok`. `seconds`: longest wait for a part of it. Also
        converts errors of the body of the `with`. Raises typed errors."""
        began, answered, more = time.monotonic(), False, {"trace": stream.trace}
        limits = httpx.Timeout(seconds, connect=CONNECT_SECONDS)
        try:
            with self._http.stream(
                method, path, content=body, extensions=more, timeout=limits
            ) as response:
                answered = True
                if response.status_code not in ok:
                    error = error_of(response.status_code, path, response.read())
                    # an ending engine refuses with exactly this class, not with a subclass
                    raise mark_unaccepted(error) if type(error) is EngineUnavailable else error
                yield response
        except httpx.RequestError as failure:
            if stream.close_error:
                raise stream.close_error from None
            if isinstance(failure, httpx.ConnectError | httpx.ConnectTimeout):
                message = f"no engine answers at {self.address}: {failure}"
                raise mark_unaccepted(EngineUnavailable(message)) from None
            if isinstance(failure, httpx.ReadTimeout) and seconds is not None:
                raise _no_answer(seconds) from None
            died = EngineDied(f"the engine ended while it held this request: {failure}")
            died.maybe_accepted = answered or time.monotonic() - began > LOST_AT_ONCE
            raise died from None
        except ValidationError as failure:  # of `EventStream.take`
            raise EngineUnavailable(f"the engine's events cannot be read: {failure}") from None


def _no_answer(seconds: float) -> EngineUnavailable:
    return EngineUnavailable(f"the engine did not answer within {seconds:g} s")


def _keep_alive() -> list[tuple[int, int, int]]:
    """Detect within half a minute that the engine's machine has left the network."""
    idle = getattr(socket, "TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE")
    tcp = socket.IPPROTO_TCP
    values = ((idle, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *((tcp, *value) for value in values)]
