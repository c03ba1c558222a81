"""`mlx-provider serve`: the engine alone, for other machines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..config import PREFIX
from .engine_options import ApiKey, finite


def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; with --port alone, 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; with --host alone, 8080.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the key that clients must send, or lines NAME KEY for several tenants; "
            f"else {PREFIX}API_KEY is taken, else one is made and kept."
        ),
    ] = None,
    drain: Annotated[
        float,
        typer.Option(
            min=0,
            callback=finite,
            help="Seconds that running requests get when it is told to stop, while new ones "
            "are refused; a second signal ends it at once. With --host or --port.",
        ),
    ] = 0.0,
    api_key: ApiKey = None,
) -> None:
    """Run the engine, by default on this user's socket.

    With --host or --port, other machines can use it: their LiteLLM config names `api_base` and key.
    """
    from ..client.lifecycle import ENGINE_COMMAND

    command = [*ENGINE_COMMAND]
    command += ["--host", host] if host is not None else []
    command += ["--port", str(port)] if port is not None else []
    command += ["--api-key-file", str(api_key_file)] if api_key_file is not None else []
    command += ["--drain", str(drain)] if drain else []
    os.execv(command[0], command)  # this process becomes the engine
