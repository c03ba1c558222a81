"""The commands of `bench`. Progress and tables go to stderr, the result as JSON to stdout."""

import json
from functools import partial
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

MODEL = "MODEL"  # stands for a model's name in the list of commands
PROGRESS = "progress"  # key of `context.meta`: the function that reports progress


class LongGroup(TyperGroup):
    """A group of commands that take minutes: they show progress, and end soon after a signal."""

    def invoke(self, ctx: Any) -> Any:
        from mlx_provider.commands import long_command

        with long_command(partial(typer.echo, err=True)) as ctx.meta[PROGRESS]:
            return super().invoke(ctx)


class ModelOrCommand(LongGroup):
    """`bench NAME` runs the command of this name, or else `speed` with the model of this name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] != MODEL and (args[0].startswith("-") or self.get_command(ctx, args[0])):
            return super().resolve_command(ctx, args)
        return "", self.get_command(ctx, MODEL), args


def preload() -> None:
    """Set up this process like an engine, whose BLAS must be loaded before MLX. Raises
    `NotInstalled` if MLX is missing."""
    from mlx_provider.commands import prepare_mlx

    prepare_mlx()


def print_result(result: dict[str, Any]) -> None:
    typer.echo(json.dumps(result))


def speed(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A folder, a Hub repository, or demo.")],
    streams: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Requests at once; repeatable. Default: 1, 4, 8."),
    ] = None,
    prompt: Annotated[
        list[int] | None,
        typer.Option(min=20, help="Tokens of a prompt; repeatable. Default: 1000, 8000, 32000."),
    ] = None,
    reply: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 128,
) -> None:
    """Measure time to first token and tokens per second of a model on this machine."""
    preload()
    from .model_speed import Plan, bench

    plan = Plan(model, streams or Plan.streams, prompt or Plan.prompts, reply)
    print_result(bench(plan, context.meta[PROGRESS]))


def prefix(
    context: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A folder, or demo, demo-hybrid, demo+image (an image before the document); "
            "repeatable, the last one has the conversation."
        ),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of the prompt; repeatable. Default: 1024, 4096, 16384."),
    ] = None,
    document: Annotated[int, typer.Option(help="Tokens of the conversation's document.")] = 17_000,
    turns: Annotated[int, typer.Option(help="Turns of the conversation.")] = 6,
) -> None:
    """Measure what a stored prefix saves: time to first token, and a conversation."""
    preload()
    from .prefix_cache import Plan
    from .prefix_cache import bench as measure

    plan = Plan(model or Plan.models, tokens or Plan.sizes, document, turns)
    print_result(measure(plan, context.meta[PROGRESS]))


HELP = "Measure this machine: a model, or ratios within one run."
bench = typer.Typer(cls=ModelOrCommand, no_args_is_help=True, help=HELP)
bench.command(MODEL)(speed)
bench.command()(prefix)
