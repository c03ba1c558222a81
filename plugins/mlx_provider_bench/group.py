"""The group `bench`, which imports its commands on demand: their options would delay other
commands. The end of a command also ends the servers, engines and proxies that it has started."""

from __future__ import annotations

from functools import partial
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

PROGRESS = "progress"
"""Key of `context.meta`: the function that reports progress."""


class LongGroup(TyperGroup):
    """Commands that take minutes: they show progress, and end soon after a signal."""

    def invoke(self, ctx: Any) -> Any:
        """Clean-ups also run after a signal. The exit code is that of a shell."""
        from mlx_provider.commands import Ended, long_command

        try:
            with long_command(partial(typer.echo, err=True)) as progress:
                ctx.meta[PROGRESS] = progress.report
                return super().invoke(ctx)
        except Ended as ended:
            raise typer.Exit(128 + ended.number) from None


class Deferred(LongGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        self._read()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        self._read()
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """A word that is not the name of a command is the name of a model."""
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
