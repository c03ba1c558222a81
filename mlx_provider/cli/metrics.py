"""`mlx-provider metrics`: the engine's metrics for Prometheus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import BadRequest
from .engine_options import ApiBase, ApiKey, ApiKeyFile, http_client, require_engine

if TYPE_CHECKING:
    from ..client.http import HttpClient


def metrics(
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Serve them on this port until Ctrl-C; 0: any free one."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="With --port: address to listen on.")] = "127.0.0.1",
    key_file: Annotated[
        Path | None,
        typer.Option(
            help="With --port: file with the key that a scrape must send. Default: one is "
            "made and kept."
        ),
    ] = None,
    no_key: Annotated[
        bool, typer.Option("--no-key", help="With --port, on loopback: scrapes need no key.")
    ] = False,
    api_base: ApiBase = None,
    api_key_file: ApiKeyFile = None,
    api_key: ApiKey = None,
) -> None:
    """Print the metrics of a running engine, or serve them to Prometheus. Starts no engine.

    Exit code 3: no engine runs.
    """
    if port is None:
        require_engine(api_base, err=True)
    client = http_client(api_base, api_key_file)
    try:
        if port is None:
            typer.echo(client.metrics(), nl=False)
        else:
            _serve(client, host, port, key_file, keyless=no_key)
    except KeyboardInterrupt:
        return
    finally:
        client.close()


def _serve(
    client: HttpClient, host: str, port: int, key_file: Path | None, *, keyless: bool
) -> None:
    from ..client.address import is_loopback
    from ..config import engine_settings
    from ..server.access import own_names
    from ..server.engine_key import kept_key, own_key_file
    from ..server.keys import Key, read_key
    from ..server.metrics_page import MetricsPage
    from ..server.side_server import run_side_server

    if keyless and not is_loopback(host):
        raise BadRequest(f"on {host} metrics need a key: omit --no-key", param="no_key")
    keys, summary = None, "no key"
    if not keyless:
        file = key_file or own_key_file(name="metrics.key")
        key, summary = (read_key(file) if key_file else kept_key(file)), f"key: {file}"
        keys = (Key(key),)
    page = MetricsPage(client, keys, own_names(host) | set(engine_settings().allowed_hosts))
    with run_side_server(page.asgi, host, port) as (address, wait):
        typer.echo(f"metrics on {address}/metrics · {summary}")
        wait()
