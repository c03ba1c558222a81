"""The statistics of an engine as a web page on loopback, without a framework or external
resources."""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from importlib.resources import files

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from ..client.http import HttpClient
from ..errors import MLXProviderError
from .access import Gate, error_response
from .keys import Key
from .ndjson import NDJSON

LOOPBACK = "127.0.0.1"
PAGE = "figures_page.html"


class FiguresPage:
    """The page is open to everyone on this machine; the statistics need the key.

    The key is in the fragment of the page's address, which a browser never sends.
    """

    def __init__(self, client: HttpClient, every: float) -> None:
        """`every`: seconds between two updates."""
        self.key = secrets.token_urlsafe(24)
        self._client = client
        self._every = every
        self._page = files(__package__).joinpath(PAGE).read_text(encoding="utf-8")
        self._headers = {
            "content-security-policy": _policy(self._page),
            "cache-control": "no-store",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }
        gate = Middleware(Gate, keys=(Key(self.key),), hosts=("localhost",), open_paths=("/",))
        self.asgi = Starlette(
            routes=[Route("/", self._shown), Route("/figures", self._figures)],
            middleware=[gate],
            exception_handlers={MLXProviderError: _typed},
        )

    async def _shown(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers=self._headers)

    async def _figures(self, request: Request) -> Response:
        lines = self._client.watch(self._every)
        first = await anyio.to_thread.run_sync(next, lines, b"")
        return StreamingResponse(_passed_on(first, lines), media_type=NDJSON)


async def _passed_on(line: bytes, lines: Iterator[bytes]) -> AsyncIterator[bytes]:
    with suppress(MLXProviderError):  # the page notices the end of its reply and asks again
        while line:
            yield line + b"\n"
            line = await anyio.to_thread.run_sync(next, lines, b"", abandon_on_cancel=True)


def _policy(page: str) -> str:
    """A policy that allows only the page's own script and style (by hash) and its own
    statistics."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash_of('script', page)}",
            f"style-src {_hash_of('style', page)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


def _hash_of(element: str, page: str) -> str:
    """The hash of an element. Raises `ValueError` for a page without it."""
    found = re.search(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
    if found is None:
        raise ValueError(f"the page has no {element}")
    digest = hashlib.sha256(found[1].encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


async def _typed(request: Request, error: Exception) -> Response:
    if not isinstance(error, MLXProviderError):
        raise error
    return error_response(error)
