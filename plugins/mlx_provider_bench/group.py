"""The group of the benchmarks' commands. The end of one also ends the servers, engines and proxies
that it has started."""

from __future__ import annotations

from functools import partial
from typing import Any

import typer
from typer.core import TyperGroup

MODEL = "MODEL"
"""Stands for a model's name in the list of commands."""
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


class ModelOrCommand(LongGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """A word that is not the name of a command is the name of a model."""
        if args[0] != MODEL and (args[0].startswith("-") or self.get_command(ctx, args[0])):
            return super().resolve_command(ctx, args)
        return "", self.get_command(ctx, MODEL), args
