"""Options of every command that talks to an engine."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..config import PREFIX, Runtime, runtime
from ..errors import EngineUnavailable

if TYPE_CHECKING:
    from ..client.http import HttpClient

NONE_RUNS = 3
"""Exit code, as for an inactive service."""

ApiBase = Annotated[
    str | None,
    typer.Option(help="http://host:port or unix:/path of an engine. Default: this machine's."),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(help=f"File with the engine's key. Default: {PREFIX}API_KEY."),
]


def no_key_in_sight(key: str | None) -> None:
    """A key on the command line is visible in the process list."""
    if key is not None:
        raise typer.BadParameter(
            f"every user of this machine could read it in the process list: set {PREFIX}API_KEY, "
            "or name a file with --api-key-file"
        )


ApiKey = Annotated[str | None, typer.Option(hidden=True, callback=no_key_in_sight)]
"""Only to name the option to use instead."""


def running_engine(
    api_base: str | None, file: Path | None = None, *, as_json: bool = False
) -> HttpClient:
    """Ends the command like `require_engine`."""
    require_engine(api_base, as_json=as_json)
    return http_client(api_base, file)


def require_engine(api_base: str | None, *, as_json: bool = False, err: bool = False) -> None:
    """End the command with a message and exit code 3 if this machine has no engine. `err`: on
    stderr, where stdout is for a program. Raises as `none_runs`."""
    if api_base is None and (why := none_runs(runtime())):
        typer.echo(json.dumps({"engine": "none", "detail": why}) if as_json else why, err=err)
        raise typer.Exit(NONE_RUNS)


def none_runs(here: Runtime) -> str:
    """Why there is no engine; empty: a process holds the lock. Raises `EngineUnavailable` for
    another user's folder, and for something else at the socket's path."""
    from ..client.runtime_folder import inspect, is_held

    if not inspect(here) or not here.socket.exists():
        held = here.lock.exists() and is_held(here.lock)
        return "" if held else f"no engine runs in {here.folder}: the first request starts one"
    if not here.socket.is_socket():
        raise EngineUnavailable(f"{here.socket} is not a socket: remove it")
    if is_held(here.lock):
        return ""
    if here.listens():
        raise EngineUnavailable(
            f"some process that is no engine of mlx-provider listens on {here.socket}: end it "
            f"(`lsof {here.socket}` names it), or set {PREFIX}RUNTIME_DIR to another folder"
        )
    return (
        f"no engine runs: {here.socket} was left behind by one that was killed, "
        "and the next request starts another in its place"
    )


def http_client(api_base: str | None = None, file: Path | None = None) -> HttpClient:
    from ..client.connection import connect
    from ..client.http import HttpClient

    client = connect(api_base, api_key_of(file))
    if not isinstance(client, HttpClient):
        raise EngineUnavailable("an in-process engine is a part of the process that uses it")
    return client


def api_key_of(file: Path | None) -> str | None:
    """Raises `BadRequest` as `read_key`."""
    from ..server.keys import read_key

    return read_key(file) if file is not None else os.environ.get(PREFIX + "API_KEY") or None


def finite(value: float) -> float:
    """Refuse infinity and NaN, which an option's bounds do not exclude."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value
