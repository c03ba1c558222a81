"""Owns the connections to engines: one per address and key, per process."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping
from functools import partial

from ..config import PREFIX, engine_settings, runtime
from ..errors import BadRequest, EngineUnavailable
from ..upstream.blas import preload
from ..upstream.installed import require_mlx
from .address import Address, parse_address
from .generation import EngineClient
from .http import HttpClient
from .identity import identity
from .in_process import InProcessClient
from .lifecycle import LocalEngine

TRANSPORT = PREFIX + "TRANSPORT"
"""`process` (default): an engine process, started on demand; `in_process`: a thread of this one."""


def connect(api_base: str | None = None, api_key: str | None = None) -> EngineClient:
    """Contacts and starts nothing before its first use. `api_base`: `http(s)://host:port` or
    `unix:/path/to.sock`; unset: this user's engine on this machine. Raises `BadRequest` for another
    form."""
    return _connections.client(api_base, api_key)


class Connections:
    """One client per address and key. Safe from any thread and across `fork`."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._lock = threading.Lock()
        self._clients: dict[tuple[str, str | None], EngineClient] = {}
        self._in_process: InProcessClient | None = None
        self._pid = os.getpid()
        os.register_at_fork(after_in_child=self._forked)

    def client(self, api_base: str | None, api_key: str | None) -> EngineClient:
        with self._lock:
            if not api_base and self._transport() == "in_process":
                return self._in_this_process()
            # Over the unix socket, access depends on the owner alone.
            key = (api_base, api_key) if api_base else ("", None)
            if key not in self._clients:
                self._clients[key] = self._make(api_base, api_key)
            return self._clients[key]

    def close(self) -> None:
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
            in_process, self._in_process = self._in_process, None
        for client in clients:
            client.close()
        if in_process is not None:
            in_process.close()

    def _transport(self) -> str:
        chosen = self._environ.get(TRANSPORT) or "process"
        if chosen not in ("process", "in_process"):
            raise BadRequest(f"{TRANSPORT}={chosen!r} must be process or in_process")
        return chosen

    def _make(self, api_base: str | None, api_key: str | None) -> EngineClient:
        if api_base:
            return HttpClient(parse_address(api_base), api_key)
        here = runtime(self._environ)
        address = Address("http://engine", os.fspath(here.socket))
        mine = partial(identity, self._environ)
        return HttpClient(address, start=LocalEngine(here).ensure, identity=mine)

    def _in_this_process(self) -> InProcessClient:
        if self._in_process is None:
            self._in_process = _build_in_process(self._environ)
            self._pid = os.getpid()
            atexit.register(self._close_at_exit)
        elif self._pid != os.getpid():
            # MLX hangs in a forked child whose parent has used it.
            raise EngineUnavailable(
                "the in-process engine does not survive fork: start workers with 'spawn', "
                f"or unset {TRANSPORT}"
            )
        return self._in_process

    def _close_at_exit(self) -> None:
        if self._pid == os.getpid():
            self.close()

    def _forked(self) -> None:
        self._lock = threading.Lock()


def _build_in_process(environ: Mapping[str, str]) -> InProcessClient:
    settings = engine_settings(environ)
    preload()
    require_mlx()
    from ..serving.service import ChatService

    return InProcessClient(ChatService(settings))


_connections = Connections()
