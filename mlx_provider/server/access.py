"""Access to a server on TCP: the operator's key (given, or created in a file of the engine's user),
named keys for others, refusal of web pages and clients without a key. Also responses to errors."""

import hashlib
import ipaddress
import os
import re
import secrets
import socket
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ..config import PREFIX
from ..errors import (
    BadRequest,
    EngineUnavailable,
    Forbidden,
    MLXProviderError,
    Unauthorized,
    WrongContentType,
)
from ..protocol.events import ErrorBody
from ..safe_open import make_folder, read_trusted
from ..wire import ERRORS

MAX_KEY_FILE_BYTES = 2**16
MIN_NAMED_KEY = 16
"""Characters. With a shorter second word, a line is probably a pass phrase, not `NAME KEY`."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SCOPE_KEY = "mlx_provider.key"  # in the ASGI scope of a request: its `Key`
SCOPE_CONNECTION = "mlx_provider.connection"  # in its `state`: a weakref to the connection
JSON = "application/json"


@dataclass(frozen=True)
class Key:
    """A key that requests must send. Its text is not in its `repr`."""

    text: str = field(repr=False)
    name: str | None = None  # whose key it is; `None`: the operator's, without limits

    def sender_fields(self, salt: str | None) -> dict[str, Any]:
        """Fields of a request that this key decides. `salt`: as the request has it. The requests of
        a named key share caches only with each other, and are one tenant."""
        if self.name is None:
            return {"origin": "remote"}
        tenant = f"key {self.name}:"
        salt = tenant + (salt or "")
        return {"origin": "named", "salt": salt, "tenant": tenant, "share": 1.0}


def remote_sender_fields(scope: Scope, salt: str | None) -> dict[str, Any]:
    """`Key.sender_fields` for a request that `Gate` has admitted."""
    key: Key = scope[SCOPE_KEY]
    return key.sender_fields(salt)


def local_sender_fields(scope: Scope, salt: str | None) -> dict[str, Any]:
    """For requests on the user's own socket: none."""
    return {}


def key_name(scope: Scope) -> str:
    """Name of the request's key. Empty: the operator's key, or a request without a key."""
    key: Key | None = scope.get(SCOPE_KEY)
    return (key.name or "") if key else ""


def read_keys(file: Path) -> tuple[Key, ...]:
    """Lines: at most one `KEY`, any number of `NAME KEY`. Raises `BadRequest` that names the line
    without its text, which could be a key."""
    try:
        text = read_trusted(file, MAX_KEY_FILE_BYTES, closed_to=0o077).decode("ascii", "replace")
    except OSError as error:
        raise BadRequest(f"key file {file}: {error.strerror}", param="api_key_file") from None
    found: dict[int, Key] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if words := line.split():
            if fault := _line_error(line.strip(), words, found):
                raise BadRequest(f"key file {file}, line {number}: {fault}", param="api_key_file")
            found[number] = Key(words[-1], *words[:-1])
    if not found:
        remedy = "write a line KEY, or lines NAME KEY"
        raise BadRequest(f"key file {file} holds no key: {remedy}", param="api_key_file")
    return tuple(found.values())


def _line_error(line: str, words: list[str], found: Mapping[int, Key]) -> str:
    """What is wrong with a line of keys, and the remedy; empty: nothing."""
    *name, text = words
    if not line.isascii() or not line.replace("\t", " ").isprintable():
        return "a character is not printable ASCII: write KEY or NAME KEY"
    if len(name) > 1:
        return "more than two words: write KEY or NAME KEY"
    if name and not NAME.fullmatch(name[0]):
        return "the name before the key must be 1 to 64 letters, digits, '.', '_' or '-'"
    if name and len(text) < MIN_NAMED_KEY:
        return f"the key after the name needs at least {MIN_NAMED_KEY} characters"
    for number, other in found.items():
        if other.text == text:
            return f"the key is that of line {number}: give each line its own"
        if other.name == (name[0] if name else None):
            no_name = f"line {number} has no name either"
            what = f"the name is that of line {number}" if name else no_name
            return f"{what}: give each key its own name (NAME KEY)"
    return ""


def read_key(file: Path) -> str:
    """Raises `BadRequest` as `read_keys`, and for several keys."""
    first, *others = read_keys(file)
    if others:
        remedy = "name a file that holds one of them"
        raise BadRequest(f"key file {file} holds several keys: {remedy}", param="api_key_file")
    return first.text


def _digest(text: bytes) -> bytes:
    # digests are compared, so that the time reveals nothing about the keys
    return hashlib.sha256(text).digest()


def engine_keys(
    file: Path | None, environ: Mapping[str, str] = os.environ
) -> tuple[tuple[Key, ...], str]:
    """The keys, and where a person finds them. Raises as `read_keys`, and `EngineUnavailable` if no
    key file can be created."""
    if file is not None:
        return read_keys(file), str(file)
    if given := environ.get(PREFIX + "API_KEY", "").strip():
        return (Key(given),), PREFIX + "API_KEY"
    own = own_key_file(environ)
    _ensure_key(own)
    return (Key(read_key(own)),), str(own)


def own_key_file(environ: Mapping[str, str] = os.environ) -> Path:
    """The file of the key that the engine creates itself."""
    base = environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "mlx-provider" / "engine.key"


def _ensure_key(file: Path) -> None:
    """Creates the file if missing."""
    try:
        if not file.exists():
            make_folder(file.parent)
            with tempfile.NamedTemporaryFile("w", dir=file.parent) as draft:  # mode 0600
                draft.write(secrets.token_urlsafe(32) + "\n")
                draft.flush()
                # fails for all processes but the first, and shows only a complete file
                with suppress(FileExistsError):
                    os.link(draft.name, file)
    except OSError as error:
        remedy = f"set {PREFIX}API_KEY, or name a file with --api-key-file"
        summary = f"no key can be kept in {file} ({error.strerror}): {remedy}"
        raise EngineUnavailable(summary) from None


class Gate:
    """ASGI middleware that refuses requests by their headers. A web page can make its visitor's
    browser send requests to loopback: these have an `Origin`, the page's `Host`, or no JSON."""

    def __init__(self, app: ASGIApp, keys: Iterable[Key], hosts: Iterable[str]) -> None:
        """`keys`: every request must send one. `hosts`: names by which clients may address this
        server, besides IP addresses."""
        self._app = app
        self._keys = {_digest(key.text.encode("utf-8", "surrogateescape")): key for key in keys}
        self._hosts = frozenset(map(host_of, hosts))

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
        self._check_origin(headers)
        scheme, _, key_text = headers.get("authorization", "").partition(" ")
        bearer = key_text.lstrip(" ") if scheme.lower() == "bearer" else ""
        given = (bearer, headers.get("x-api-key", ""))
        first, second = (self._keys.get(_digest(text.encode("latin-1"))) for text in given)
        if (key := first or second) is None:
            raise Unauthorized("the engine's key is missing or wrong: set api_key")
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and media_type != JSON:
            raise WrongContentType(f"send the body as content-type: {JSON}", param="content-type")
        scope[SCOPE_KEY] = key
        reference = scope.get("state", {}).get(SCOPE_CONNECTION)
        if reference is not None and (connection := reference()) is not None:
            connection.admit(key_name(scope))  # raises `Overloaded`: too many for this key

    def _check_origin(self, headers: Headers) -> None:
        host = host_of(headers.get("host", ""))
        # A page can rebind its host name to this machine, but not an IP address.
        if host not in self._hosts and not _is_ip(host):
            remedy = "address it by IP, or let its owner list the name (MLX_PROVIDER_ALLOWED_HOSTS)"
            raise Forbidden(f"this Host is not the engine's: {remedy}", param="host")
        if "origin" in headers:
            raise Forbidden("requests of web pages are refused (header Origin)", param="origin")


@dataclass(frozen=True)
class OperatorOnly:
    """ASGI middleware of routes that show or change requests of all tenants."""

    _app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if key_name(scope):
            remedy = "send the engine's key without a name (a line KEY in its key file)"
            raise Forbidden(f"a named key may not use this route: {remedy}")
        await self._app(scope, receive, send)


def host_names(host: str) -> set[str]:
    """Names by which other machines may address this one, if it listens on `host`."""
    short = (machine := socket.gethostname()).partition(".")[0]
    return {"localhost", host, machine, short, f"{short}.local"}


def _is_ip(host: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def host_of(header: str) -> str:
    """The name or IP address in a `Host` header, in lower case."""
    name = header.rsplit(":", 1)[0] if header.rfind(":") > header.rfind("]") else header
    return name.strip("[]").rstrip(".").lower()


def error_response(
    error: MLXProviderError, headers: dict[str, str] | None = None, path: str = ""
) -> JSONResponse:
    """The response to an error before the first event, in the form of the route's API; on our own
    routes `{"error": ErrorBody}`."""
    body, more = ErrorBody.of(error).model_dump(), dict(headers or {})
    if error.retry_after is None:
        del body["retry_after"]
    else:
        more.setdefault("retry-after", str(ceil(error.retry_after)))
    form = ERRORS.get(path)
    content = {"error": body} if form is None else form(error)
    return JSONResponse(content, status_code=error.status, headers=more)
