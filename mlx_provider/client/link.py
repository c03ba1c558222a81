"""The connections of one client in one process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ssl
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import anyio
import httpx

from ..errors import EngineUnavailable, MLXProviderError
from ..protocol.health import Health
from .address import Address
from .exchange import CONNECT_LIMIT, Exchanges, Post, keepalive_options
from .generation import Generation
from .io_thread import IOThread, client_closed
from .lines import Lines
from .retry import NotTaken, lost, refused, unreachable
from .wire import error_of, first_line, lines_of, parse_health

T = TypeVar("T")

ATTACH_LIMIT = 60.0
"""Seconds for a listening engine to say who it is."""
IDLE_EXPIRY = 30.0
"""Seconds an unused connection is kept: less than the server's, so that it never closes first."""
JSON = {"content-type": "application/json"}


@dataclass
class Attachment:
    """A long-lived connection: the engine knows that its client lives, and the reverse."""

    health: Health
    """State of the engine when it was reached."""
    scope: anyio.CancelScope
    gone: threading.Event
    """Set once either side has ended it."""


class Link:
    """Thread and connections start with the first call. Every public method: any thread."""

    def __init__(self, address: Address, headers: dict[str, str]) -> None:
        self.attaching = threading.Lock()
        """Held by the one thread that connects or starts the engine."""
        self.attachment: Attachment | None = None
        self._address = address
        self._headers = headers
        self._starting = threading.Lock()
        self._thread: IOThread | None = None
        self._closed = False
        # Loading the certificate store takes 20 ms, which only https needs.
        self._tls = httpx.create_ssl_context() if address.url.startswith("https:") else None
        self._http = _http_client(address, headers, self._tls)
        self._exchanges = Exchanges()
        self._running: dict[asyncio.Task[None], anyio.CancelScope] = {}

    def attach(self) -> Attachment:
        """Connect and learn who the engine is. Raises `NotTaken` where nobody listens."""
        self.attachment = self._call(self._attach())
        return self.attachment

    def drop(self, attachment: Attachment) -> None:
        """Forget an engine that did not take a request; the next call connects anew."""
        attachment.gone.set()
        self._soon(attachment.scope.cancel)

    def send(self, path: str, body: bytes) -> Generation:
        """Send a request, wait until it is accepted. Raises typed errors and `NotTaken`."""
        post = Post(self._address, path, self._headers, body, self._tls, self._begun)
        accepted, events = self._exchanges.run(post)
        return Generation(accepted, events, events.close)

    def ask(
        self, method: str, path: str, ok: tuple[int, ...] = (200,), body: bytes | None = None
    ) -> bytes:
        """One short question. Raises typed errors and `NotTaken`."""
        return self._call(self._ask(method, path, ok, body))

    def lines(self, path: str) -> Lines:
        """The lines of a reply that goes on. Reading them raises typed errors."""
        return Lines(self._begun, self._lines(path))

    def close(self) -> None:
        """Cancel what runs and close every connection. Idempotent."""
        with self._starting:
            self._closed = True
            thread, self._thread = self._thread, None
        self._exchanges.close()
        if thread is not None:
            thread.call(self._shut())
            thread.stop()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return self._started(work).call(work)

    def _begun(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return self._started(work).begin(work)

    def _started(self, work: Coroutine[Any, Any, T]) -> IOThread:
        """The thread that is to do the work."""
        with self._starting:
            if self._closed:
                work.close()
                raise client_closed()
            if self._thread is None:
                self._thread = IOThread(f"mlx-provider client of {self._address}")
            return self._thread

    def _soon(self, function: Callable[[], None]) -> None:
        thread = self._thread
        if thread is not None:
            thread.soon(function)

    async def _shut(self) -> None:
        running = dict(self._running)
        for scope in running.values():
            scope.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._http.aclose()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> anyio.CancelScope:
        """Run `work` until it ends or the scope is cancelled.

        Never by `Task.cancel`: it breaks through the shields in which httpcore 1.0.9
        (`AsyncConnectionPool._close_connections`) closes connections, and some stay open.
        """
        scope = anyio.CancelScope()

        async def run() -> None:
            with scope:
                await work

        task = asyncio.get_running_loop().create_task(run())
        self._running[task] = scope
        task.add_done_callback(self._running.pop)
        return scope

    async def _begin(
        self, talk: Callable[[asyncio.Future[T]], Coroutine[Any, Any, None]]
    ) -> tuple[T, anyio.CancelScope]:
        """Spawn a talk with the engine; what it puts into the future first, and how to end it."""
        first: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        scope = self._spawn(talk(first))
        try:
            return await first, scope
        except asyncio.CancelledError:
            scope.cancel()
            raise

    async def _attach(self) -> Attachment:
        gone = threading.Event()
        try:
            async with asyncio.timeout(ATTACH_LIMIT):
                health, scope = await self._begin(partial(self._stay, gone))
        except TimeoutError:
            raise EngineUnavailable(
                f"the engine at {self._address} did not answer within {ATTACH_LIMIT:g} s"
            ) from None
        return Attachment(health, scope, gone)

    async def _stay(self, gone: threading.Event, found: asyncio.Future[Health]) -> None:
        """Hold the attach connection until either side ends."""
        try:
            async with self._reply("GET", "/v1/attach") as response:
                pieces = response.aiter_raw()
                line = await first_line(pieces)
                if not found.done():
                    found.set_result(parse_health(line))
                async for _ in pieces:
                    pass
        except (MLXProviderError, NotTaken) as error:
            if not found.done():
                found.set_exception(error)
        finally:
            gone.set()

    async def _ask(self, method: str, path: str, ok: tuple[int, ...], body: bytes | None) -> bytes:
        async with self._reply(method, path, body, ok) as response:
            return await response.aread()

    async def _lines(self, path: str) -> AsyncGenerator[bytes, None]:
        try:
            async with self._reply("GET", path) as response:
                async for line in lines_of(response):
                    yield line
        except NotTaken as failure:
            raise failure.error from None

    @asynccontextmanager
    async def _reply(
        self, method: str, path: str, body: bytes | None = None, ok: tuple[int, ...] = (200,)
    ) -> AsyncIterator[httpx.Response]:
        """A reply whose head is good; connection trouble becomes one of our errors."""
        if self._closed:
            raise client_closed()
        began = time.monotonic()
        answered = False
        try:
            async with self._http.stream(method, path, content=body, headers=JSON) as response:
                answered = True
                if response.status_code not in ok:
                    body = await response.aread()
                    raise refused(error_of(response.status_code, path, body))
                yield response
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise unreachable(self._address, error) from None
        except httpx.TransportError as error:
            raise lost(error, None if answered else time.monotonic() - began) from None


def _http_client(
    address: Address, headers: dict[str, str], tls: ssl.SSLContext | None
) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(
        uds=address.socket,
        verify=tls or False,
        limits=httpx.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_EXPIRY
        ),
        socket_options=None if address.socket else keepalive_options(),
    )
    return httpx.AsyncClient(
        base_url=address.url,
        headers=headers,
        transport=transport,
        timeout=httpx.Timeout(None, connect=CONNECT_LIMIT),
        # A proxy of the environment is meant for the internet, not for this engine.
        trust_env=False,
    )
