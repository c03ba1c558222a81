"""`mlx-provider cache`: the contents of the engine's prefix caches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console

from .engine_options import ApiBase, ApiKey, ApiKeyFile, running_engine


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
