"""`mlx-provider serve-ranks`: an engine over several processes or machines."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from mlx_provider.errors import BadRequest

GROUP_COMMAND = (sys.executable, "-P", "-m", "mlx_provider_ranks")


def serve_ranks(
    ranks: Annotated[
        int | None,
        typer.Option(min=2, help="Share one model among so many processes of this machine."),
    ] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Share one model among the machines that this file of mlx.launch lists; the "
            "first one answers requests.",
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="How ranks are linked: ring, jaccl; default: as the hostfile says."),
    ] = None,
    starting_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="First port of the links between ranks."),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; with --port alone, 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; with --host alone, 8080.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the key that clients must send, as for `serve`.")
    ] = None,
    drain: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds that requests may take to end once the group is told to stop."
        ),
    ] = 0.0,
) -> None:
    """Run one engine over several ranks, which share each model.

    Name either --ranks or --hostfile. Clients see one engine, as with `serve`.
    """
    if not math.isfinite(drain):
        raise BadRequest("--drain: name a number of seconds", param="drain")
    options = {
        "--ranks": ranks,
        "--hostfile": hostfile,
        "--backend": backend,
        "--starting-port": starting_port,
        "--host": host,
        "--port": port,
        "--api-key-file": api_key_file,
        "--drain": drain or None,
    }
    settings = [(name, str(value)) for name, value in options.items() if value is not None]
    command = [*GROUP_COMMAND, *(word for pair in settings for word in pair)]
    os.execv(command[0], command)  # this process becomes the supervisor
