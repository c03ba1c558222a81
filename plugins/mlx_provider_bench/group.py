"""The group `bench`, whose commands are read when one of them, or their list, is asked for.

They have dozens of options, for which no other command of `mlx-provider` should wait. What ends a
command ends the servers, engines and proxies that it has started.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group


class LongGroup(TyperGroup):
    """Its commands take minutes: they show that they run, and a signal ends them soon."""

    def invoke(self, ctx: Any) -> Any:
        """Clean-ups run after a signal, too; its exit code is a shell's."""
        from mlx_provider.commands import Ended, long_command

        try:
            with long_command(__package__, partial(typer.echo, err=True)):
                return super().invoke(ctx)
        except Ended as ended:
            raise typer.Exit(128 + ended.number) from None


class Deferred(LongGroup):
    """Reads the commands of `commands.bench` at its first use."""

    def list_commands(self, ctx: Any) -> list[str]:
        self._read()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        self._read()
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """A word that is no command's name is a model's name."""
        from .commands import MODEL

        if args[0] != MODEL and (args[0].startswith("-") or self.get_command(ctx, args[0])):
            return super().resolve_command(ctx, args)
        return "", self.get_command(ctx, MODEL), args

    def _read(self) -> None:
        from .commands import bench as commands

        if not self.commands:
            self.commands.update(get_group(commands).commands)


bench = typer.Typer(
    cls=Deferred,
    no_args_is_help=True,
    help="Measure this machine: a model, or ratios within one run.",
)
