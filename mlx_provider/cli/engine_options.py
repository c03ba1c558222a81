"""Options of every command that talks to an engine.

`mlx-provider cache`: the contents of the engine's prefix caches.

`mlx-provider metrics`: the engine's metrics for Prometheus.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..config import PREFIX, Runtime, runtime
from ..errors import BadRequest, EngineUnavailable

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
    from ..server.access import read_key

    return read_key(file) if file is not None else os.environ.get(PREFIX + "API_KEY") or None


def finite(value: float) -> float:
    """Refuse infinity and NaN, which an option's bounds do not exclude."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Empty every prefix cache.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    api_base: ApiBase = None,
    api_key_file: ApiKeyFile = None,
    api_key: ApiKey = None,
) -> None:
    """Show what the prefix cache of a running engine holds, or empty it.

    Exit code 3: no engine runs.
    """
    client = running_engine(api_base, api_key_file, as_json=as_json)
    if clear:
        client.cache_clear()
    report = client.cache_report()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    for line in described(report) or ["the prefix cache is empty"]:
        console.print(line, markup=False)


def described(report: Mapping[str, Any], indent: str = "") -> list[str]:
    lines = []
    for name, value in report.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{name}", *described(value, indent + "  ")]
        else:
            lines.append(f"{indent}{name}: {value}")
    return lines


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
    from ..client.stream_connection import is_loopback
    from ..config import engine_settings
    from ..server.access import Key, kept_key, own_key_file, own_names, read_key
    from ..server.listen import run_side_server
    from ..server.metrics_page import MetricsPage

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
