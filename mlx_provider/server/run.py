"""Starts an engine process: options, lock, BLAS, service, socket. `python -m
mlx_provider.server.run` is one, with the options of `mlx-provider serve`."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from .. import __version__
from ..client.runtime_folder import READY, EngineLock, check_folder, holder, identity, limit_log
from ..config import home_state, runtime
from ..errors import BadRequest, EngineDied, EngineUnavailable, MLXProviderError
from ..logs import log_to_stderr, printable
from ..protocol.event_queue import Deliver
from ..protocol.events import ErrorBody
from ..settings import EngineSettings, engine_settings
from ..upstream.runtime import (
    active_blas,
    configure_heap,
    preload_blas,
    quiet_transformers,
    require_mlx,
    set_variables,
)
from .access import engine_keys, host_names
from .app import EngineApp
from .connections import Listener, listen_tcp, listen_unix, raise_file_limit
from .process import EngineServer, LoopDelivery

if TYPE_CHECKING:
    from ..serving.service import ChatService

SWITCH = 0.0005
"""Switch interval of Python threads in seconds. Beside threads that prepare prompts, a decode step
of 14 ms took 24 ms with this value, and 45 ms with Python's default of 5 ms."""
log = logging.getLogger(__name__)

BuildService = Callable[[EngineSettings, Deliver], "ChatService"]


@dataclass(frozen=True)
class ServeOptions:
    """Where the engine listens. Without `host` and `port`: on this user's unix socket."""

    host: str | None = None
    port: int | None = None
    api_key_file: Path | None = None
    drain: float = 0.0  # seconds for requests in flight after the stop; only on TCP
    lock_fd: int | None = None  # open file of the engine lock, which the starting client has taken
    ready_fd: int | None = None  # open file to write to that the engine listens, or why not


def serve(
    options: ServeOptions,
    build: BuildService | None = None,
    fixed: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """Run an engine until it ends; returns the exit code. `fixed`: other values of `FixedSettings`.
    A failure to start is one line on stderr and exit code 1, never a traceback. On TCP, the process
    starts itself anew after the death of the engine thread."""
    try:
        settings = EngineSettings(**{**dict(engine_settings()), **fixed})
        log_to_stderr(settings.log_level)
        logging.getLogger("uvicorn").setLevel("WARNING")
        raise_file_limit()
        quiet_transformers()
        sys.setswitchinterval(SWITCH)
        on_tcp = options.host is not None or options.port is not None
        (_serve_tcp if on_tcp else _serve_unix)(options, settings, build or chat_service)
    except MLXProviderError as error:
        _say(f"mlx-provider: {error.message}")
        if not isinstance(error, EngineDied):  # else its start is reported, and that file closed
            _report(options, ErrorBody.of(error).model_dump_json().encode() + b"\n")
        return 1
    return 0


def main(
    build: BuildService | None = None, fixed: Mapping[str, Any] = MappingProxyType({})
) -> NoReturn:
    """`serve` with the options of the command line, then end the process."""
    parser = argparse.ArgumentParser(description="as `mlx-provider serve`")
    for name, kind in (("host", str), ("port", int), ("api-key-file", Path), ("drain", float)):
        parser.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS)
    for name in ("lock-fd", "ready-fd"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    end_process(serve(ServeOptions(**vars(parser.parse_args())), build, fixed))


def end_process(code: int) -> NoReturn:
    """End at once: a thread that loads a model cannot be interrupted, and MLX may abort in a normal
    exit. All data is already written."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def chat_service(settings: EngineSettings, deliver: Deliver) -> ChatService:
    """The service of a real engine. Imports MLX."""
    gc.disable()  # an eighth of the time of these imports
    try:
        prepare_mlx()
        from ..serving.service import ChatService
    finally:
        gc.freeze()
        gc.enable()
    return ChatService(settings, deliver)


def prepare_mlx() -> None:
    """Call before the first import of MLX. Raises `NotInstalled` if it is missing."""
    preload_blas()
    set_variables(home_state())
    configure_heap()
    require_mlx()


def _serve_unix(options: ServeOptions, settings: EngineSettings, build: BuildService) -> None:
    if options.drain:
        why = "Clients of this machine's engine start the next one, which waits for its end"
        problem = "--drain is for engines on TCP: add --host or --port"
        raise BadRequest(f"{problem}. {why}", param="drain")
    here = runtime()
    check_folder(here, make=True)
    if options.ready_fd is not None:  # a client started it, with its output in this file
        limit_log(here.log)
    fd = options.lock_fd
    lock = EngineLock.try_take(here.lock) if fd is None else EngineLock.inherit(fd)
    if lock is None:
        running = holder(here.lock)
        raise EngineUnavailable(f"an engine already runs in {here.folder} (process {running})")
    try:
        lock.sign()
        limit = None if fd is None else settings.idle_timeout
        asyncio.run(_run(options, settings, build, lambda: listen_unix(here.socket), limit))
    finally:
        lock.release()


def _serve_tcp(options: ServeOptions, settings: EngineSettings, build: BuildService) -> None:
    host, port = options.host or "127.0.0.1", options.port if options.port is not None else 8080
    keys, place = engine_keys(options.api_key_file)
    listener = listen_tcp(host, port)
    access: dict[str, Any] = {"keys": keys, "hosts": host_names(host) | set(settings.allowed_hosts)}
    note = f" · key: {place}"
    try:
        asyncio.run(_run(options, settings, build, lambda: listener, note=note, **access))
    except EngineDied as error:  # no client could start another
        _say(f"mlx-provider: {error.message}")
        again = [*sys.orig_argv[1:], "--port", listener.address.rpartition(":")[2]]
        os.execv(sys.executable, [sys.executable, *again])


async def _run(
    options: ServeOptions,
    settings: EngineSettings,
    build: BuildService,
    listen: Callable[[], Listener],
    idle_limit: float | None = None,
    note: str = "",
    **access: Any,
) -> None:
    own = {} if "keys" in access else identity()  # before a plugin is imported
    service = build(settings, LoopDelivery(asyncio.get_running_loop()))
    try:
        listener = listen()
    except MLXProviderError:
        service.close()
        raise
    body_bytes = settings.body_bytes
    app = EngineApp(service, blas=active_blas(), body_bytes=body_bytes, identity=own, **access)
    ready = partial(_ready, options, listener, app, note)
    server = EngineServer(app, service, listener, ready, drain=options.drain)
    await server.run_until_stopped(idle_limit)


def _ready(options: ServeOptions, listener: Listener, app: EngineApp, note: str) -> None:
    state = app.state()
    where = f"engine on {listener.address} · process {os.getpid()}"
    _say(f"mlx-provider {__version__} {where} · {state.device} · BLAS: {state.blas}{note}")
    _report(options, READY)


def _say(line: str) -> None:
    sys.stderr.write(printable(line) + "\n")
    sys.stderr.flush()


def _report(options: ServeOptions, line: bytes) -> None:
    if options.ready_fd is not None:
        try:
            os.write(options.ready_fd, line)
            os.close(options.ready_fd)
        except OSError as error:
            log.warning("the starting client is gone: %s", error)


if __name__ == "__main__":
    main()
