"""`mlx-provider serve`: the engine alone, for other machines."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ..config import PREFIX
from .engine_options import ApiKey


def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; with --port alone, 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; with --host alone, 8080.")
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Run the engine; without --host and --port, on this user's socket.

    Other machines name it with `api_base` and the same key in their LiteLLM config.
    """
    from ..client.lifecycle import ENGINE_COMMAND

    command = [*ENGINE_COMMAND]
    command += ["--host", host] if host is not None else []
    command += ["--port", str(port)] if port is not None else []
    key = {PREFIX + "API_KEY": api_key} if api_key else {}
    # This process becomes the engine: nothing of the command line stays in memory.
    os.execve(command[0], command, {**os.environ, **key})
