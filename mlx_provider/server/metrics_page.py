"""Metrics of an engine on a separate port, because the owner's engine listens on no port."""

from __future__ import annotations

from collections.abc import Iterable

import anyio.to_thread
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..client.http import HttpClient
from ..errors import EngineUnavailable, MLXProviderError
from .access import Gate, Key, error_response
from .app import PROMETHEUS

UP = """\
# HELP mlx_provider_up Whether an engine answers; without one there are no other metrics.
# TYPE mlx_provider_up gauge
mlx_provider_up {up}
"""


class MetricsPage:
    """`/metrics`, read from the engine at every scrape. Never starts an engine or keeps one
    running."""

    def __init__(
        self, client: HttpClient, keys: Iterable[Key] | None, hosts: Iterable[str]
    ) -> None:
        self._client = client
        self.asgi = Starlette(
            routes=[Route("/metrics", self._metrics)],
            middleware=[Middleware(Gate, keys=keys, hosts=hosts)],
            exception_handlers={MLXProviderError: _typed_response},
        )

    async def _metrics(self, request: Request) -> Response:
        try:
            figures = await anyio.to_thread.run_sync(self._client.metrics)
        except EngineUnavailable:  # an engine starts with the next request and ends when it is idle
            return _page(b"", up=0)
        return _page(figures, up=1)


def _page(figures: bytes, up: int) -> Response:
    return Response(figures + UP.format(up=up).encode(), headers={"content-type": PROMETHEUS})


async def _typed_response(request: Request, error: Exception) -> Response:
    if not isinstance(error, MLXProviderError):
        raise error
    return error_response(error)
