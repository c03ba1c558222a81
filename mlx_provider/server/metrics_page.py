"""Metrics of an engine on a separate port, because the owner's engine listens on no port."""

from collections.abc import Callable, Iterable
from contextlib import suppress

import anyio.to_thread
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..client.http import HttpClient
from ..errors import EngineUnavailable, MLXProviderError
from .access import Gate, Key
from .app import PROMETHEUS, typed_response
from .listen import listen_tcp

UP = """\
# HELP mlx_provider_up Whether an engine answers; without one there are no other metrics.
# TYPE mlx_provider_up gauge
mlx_provider_up {up}
"""


def metrics_page(client: HttpClient, keys: Iterable[Key] | None, hosts: Iterable[str]) -> Starlette:
    """`/metrics`, read from the engine at every scrape. Never starts an engine or keeps one
    running."""

    async def metrics(request: Request) -> Response:
        page, up = b"", 0
        with suppress(EngineUnavailable):  # the next request starts one
            page, up = await anyio.to_thread.run_sync(client.metrics), 1
        return Response(page + UP.format(up=up).encode(), headers={"content-type": PROMETHEUS})

    return Starlette(
        routes=[Route("/metrics", metrics)],
        middleware=[Middleware(Gate, keys=keys, hosts=hosts)],
        exception_handlers={MLXProviderError: typed_response},
    )


def serve_page(page: Starlette, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Until SIGINT or SIGTERM. `announce` gets the address. Raises `EngineUnavailable`."""
    listener = listen_tcp(host, port)
    config = uvicorn.Config(page, lifespan="off", ws="none", log_config=None, access_log=False)
    config.server_header, config.timeout_graceful_shutdown = False, 1
    with listener.socket:
        announce(listener.address)
        uvicorn.Server(config).run(sockets=[listener.socket])
