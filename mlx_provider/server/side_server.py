"""A small server beside the engine on a separate port."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from .listen import listen_tcp


@contextmanager
def run_side_server(app: ASGIApp, host: str, port: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields its address, and a function that serves until SIGINT or SIGTERM. Raises
    `EngineUnavailable`."""
    listener = listen_tcp(host, port)
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    try:
        yield listener.address, lambda: server.run(sockets=[listener.socket])
    finally:
        listener.socket.close()
