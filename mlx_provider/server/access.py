"""Access control of the engine over TCP: refuses web pages and clients without its key."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from math import ceil

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import Forbidden, MLXProviderError, Unauthorized, WrongContentType
from ..protocol.events import ErrorBody
from ..wire.routes import ERRORS
from .keys import CONNECTION, FOUND, Key, Keys, is_named, owner_of

JSON = "application/json"


class Gate:
    """ASGI middleware that refuses requests by their headers.

    A web page of any origin can make its visitor's browser send requests to loopback. Browsers then
    send the page's `Origin`, must ask before they send JSON, and name the page's host. Our clients
    send no `Origin`."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Iterable[Key] | None,
        hosts: Iterable[str],
    ) -> None:
        """`keys`: every request must send one; `None`: need not. `hosts`: names by which clients
        may address this server, besides IP addresses."""
        self._app = app
        self._keys = None if keys is None else Keys(keys)
        self._hosts = frozenset(map(str.lower, hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._admit(scope)
            except MLXProviderError as refused:
                answer = error_response(refused, {"connection": "close"}, scope["path"])
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        key = None if self._keys is None else self._keys.sent(headers)
        known = key is not None or self._keys is None
        refused = self._refused(scope["method"], headers, known=known)
        if refused is not None:
            raise refused
        if key is not None:
            scope[FOUND] = key
            connection = scope.get("state", {}).get(CONNECTION, lambda: None)()
            if connection is not None:
                connection.admit(owner_of(scope))

    def _refused(self, method: str, headers: Headers, *, known: bool) -> MLXProviderError | None:
        if not self._known_host(headers.get("host", "")):
            return Forbidden(
                "this Host is not the engine's: address it by IP, or let its owner list the name "
                "(MLX_PROVIDER_ALLOWED_HOSTS)",
                param="host",
            )
        if "origin" in headers:
            return Forbidden("requests of web pages are refused (header Origin)", param="origin")
        if not known:
            return Unauthorized("the engine's key is missing or wrong: set api_key")
        if method == "POST" and _media_type(headers) != JSON:
            return WrongContentType(f"send the body as content-type: {JSON}", param="content-type")
        return None

    def _known_host(self, header: str) -> bool:
        name = host_of(header)
        return name in self._hosts or _is_address(name)


class OperatorsAlone:
    """ASGI middleware of routes that show or change requests of all tenants."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_named(scope):
            raise Forbidden(
                "a named key may not use this route: send the engine's key without a name (a line "
                "KEY in its key file)"
            )
        await self._app(scope, receive, send)


def own_names(host: str) -> set[str]:
    """Names by which other machines may address this one, if it listens on `host`."""
    machine = socket.gethostname()
    return {"localhost", host, machine, f"{machine.partition('.')[0]}.local"}


def host_of(header: str) -> str:
    name = header.rsplit(":", 1)[0] if header.rfind(":") > header.rfind("]") else header
    return name.strip("[]").rstrip(".").lower()


def error_response(
    error: MLXProviderError, headers: dict[str, str] | None = None, path: str = ""
) -> JSONResponse:
    """The response to an error before the first event, in the form of the route's API; on our own
    routes `{"error": ErrorBody}`."""
    body, more = ErrorBody.of(error).model_dump(), dict(headers or {})
    if body.pop("retry_after") is not None:
        body["retry_after"] = error.retry_after
        more.setdefault("retry-after", str(ceil(error.retry_after or 0)))
    form = ERRORS.get(path)
    content = {"error": body} if form is None else form(error)
    return JSONResponse(content, status_code=error.status, headers=more)


def _media_type(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _is_address(name: str) -> bool:
    # A page can rebind its host name to this machine, but not an IP address.
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
