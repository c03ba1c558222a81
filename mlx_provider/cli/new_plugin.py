"""`mlx-provider new-plugin`: the folder of a working plugin, from which an author starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import BadRequest
from ..registry import PluginRegistry
from ..scaffold.kinds import KINDS, Kind


def new_plugin(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name, such as my-format.")],
    family: Annotated[bool, typer.Option("--family", help=KINDS["family"].about)] = False,
    tool_parser: Annotated[
        bool, typer.Option("--tool-parser", help=KINDS["tool-parser"].about)
    ] = False,
    reasoning_parser: Annotated[
        bool, typer.Option("--reasoning-parser", help=KINDS["reasoning-parser"].about)
    ] = False,
    drafter: Annotated[bool, typer.Option("--drafter", help=KINDS["drafter"].about)] = False,
    kernels: Annotated[bool, typer.Option("--kernels", help=KINDS["kernels"].about)] = False,
    folder: Annotated[Path, typer.Option(help="Where to create its folder.")] = Path(),
) -> None:
    """Write the folder of a new plugin: a working example of its kind, with tests that pass."""
    from ..scaffold import named, write_plugin

    kind = _one_kind(
        {
            "family": family,
            "tool-parser": tool_parser,
            "reasoning-parser": reasoning_parser,
            "drafter": drafter,
            "kernels": kernels,
        }
    )
    registry = PluginRegistry.of(context)
    plugin = named(name, kind, registry)
    files = write_plugin(plugin, kind, folder)
    for path in files:
        typer.echo(path)
    typer.echo(f"\nNext, in {folder / plugin.distribution}:")
    steps = _next_steps(plugin.name, plugin.module)
    width = max(len(command) for command, _ in steps)
    for command, reason in steps:
        typer.echo(f"  {command:<{width}}  # {reason}")


def _one_kind(asked: dict[str, bool]) -> Kind:
    """Raises `BadRequest` for none or several."""
    chosen = [option for option, is_asked in asked.items() if is_asked]
    options = ", ".join(f"--{option}" for option in KINDS)
    if not chosen:
        raise BadRequest(f"choose what the plugin provides: one of {options}", param="name")
    if len(chosen) > 1:
        given = " and ".join(f"--{option}" for option in chosen)
        raise BadRequest(f"{given}: choose one, and add the other hook later")
    return KINDS[chosen[0]]


def _next_steps(name: str, module: str) -> tuple[tuple[str, str], ...]:
    return (
        ("pip install -e . 'mlx-provider[testing]'", "the engine finds it; brings pytest"),
        ("pytest", "its tests pass as it is"),
        (f"$EDITOR {module}/__init__.py", "make it yours"),
        ("mlx-provider plugins", "what it brings, or why it is off"),
        ("python try_it.py", "a served answer"),
        (f"pytest --mlx-conformance {name}", "what every plugin of its kind must do"),
    )
