"""Options of every command that talks to an engine."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..config import PREFIX
from ..errors import EngineUnavailable

if TYPE_CHECKING:
    from ..client.http import HttpClient

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
    from ..server.engine_key import read_key

    return read_key(file) if file is not None else os.environ.get(PREFIX + "API_KEY") or None


def finite(value: float) -> float:
    """Refuse infinity, and NaN, which no bound of an option keeps out."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number")
    return value
