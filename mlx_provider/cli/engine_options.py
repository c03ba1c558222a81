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
"""Exit code where there is no engine, as of a service that is not active."""

ApiBase = Annotated[
    str | None,
    typer.Option(help="http://host:port or unix:/path of an engine; else the one of this machine."),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(help=f"File with the engine's key; else {PREFIX}API_KEY is taken."),
]


def no_key_in_sight(key: str | None) -> None:
    """A key on the command line shows in the process list."""
    if key is not None:
        raise typer.BadParameter(
            f"every user of this machine could read it in the process list: set {PREFIX}API_KEY, "
            "or name a file with --api-key-file"
        )


ApiKey = Annotated[str | None, typer.Option(hidden=True, callback=no_key_in_sight)]
"""Taken only to say what to give in its place."""


def running_engine(
    api_base: str | None, file: Path | None = None, *, as_json: bool = False
) -> HttpClient:
    """The client of an engine that runs. Ends the command as `require_engine` does."""
    require_engine(api_base, as_json=as_json)
    return http_client(api_base, file)


def require_engine(api_base: str | None, *, as_json: bool = False, err: bool = False) -> None:
    """End the command with a line and exit code 3 where this machine has no engine.

    `err`: the line goes to stderr, where stdout is for a program. Raises as `none_runs` does.
    """
    if api_base is None and (why := none_runs(runtime())):
        typer.echo(json.dumps({"engine": "none", "detail": why}) if as_json else why, err=err)
        raise typer.Exit(NONE_RUNS)


def none_runs(here: Runtime) -> str:
    """Why there is no engine, in a line; empty: some process holds the lock.

    Raises `EngineUnavailable` for a folder of another user, and where something else than an
    engine is at the socket's place.
    """
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
    """The client of an engine in another process; starts none."""
    from ..client.connection import connect
    from ..client.http import HttpClient

    client = connect(api_base, api_key_of(file))
    if not isinstance(client, HttpClient):
        raise EngineUnavailable("an in-process engine is part of the process that uses it")
    return client


def api_key_of(file: Path | None) -> str | None:
    """The engine's key, from the file or the environment. Raises `BadRequest` as `read_key`."""
    from ..server.keys import read_key

    return read_key(file) if file is not None else os.environ.get(PREFIX + "API_KEY") or None


def finite(value: float) -> float:
    """Refuse infinity, and NaN, which no bound of an option keeps out."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number")
    return value
