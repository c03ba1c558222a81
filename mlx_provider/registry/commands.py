"""Adds a plugin's commands to the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from typer.main import get_command_name, get_group, solve_typer_info_defaults

from ..errors import PluginError

if TYPE_CHECKING:
    import pluggy


def adopt(cli: typer.Typer, hooks: pluggy.HookRelay) -> None:
    """Add the commands of a plugin's `mlx_register_commands` to `cli`; on any error, none. They are
    built once on a separate app, so that a signature that typer cannot read fails here, not at
    `--help`. Raises `PluginError` for a name in use, and any error of the plugin."""
    scratch = typer.Typer()
    hooks.mlx_register_commands(cli=scratch)
    if not scratch.registered_commands and not scratch.registered_groups:
        return
    taken = sorted(get_group(scratch).commands.keys() & names(cli))
    if taken:
        raise PluginError(f"the command {taken[0]!r} exists already")
    cli.registered_commands += scratch.registered_commands
    cli.registered_groups += scratch.registered_groups


def names(app: typer.Typer) -> set[str]:
    """Names of commands and groups, without building them, which takes time. As in
    `typer.main.get_group_from_info` (typer 0.29)."""
    found = {
        command.name or get_command_name(command.callback.__name__)
        for command in app.registered_commands
        if command.callback is not None
    }
    for group in app.registered_groups:
        name = solve_typer_info_defaults(group).name
        if name:
            found.add(name)
        elif group.typer_instance is not None:
            found |= names(group.typer_instance)
    return found
