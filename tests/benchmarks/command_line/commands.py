"""The list of the benchmarks that developers run; the last line of each is JSON."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mlx_provider_bench.commands import LongGroup

from . import running
from .comparing import compare, engine, report
from .running import Dtype, Rounds

benchmarks = typer.Typer(cls=LongGroup, no_args_is_help=True, help=__doc__)
for command in (compare, report, engine):
    benchmarks.command()(command)
ANOTHER_COMMAND = {"allow_interspersed_args": False, "ignore_unknown_options": True}
"""What follows the arguments is another command's."""
Checkpoint = Annotated[Path, typer.Option("--model", help="A checkpoint's folder.", exists=True)]


@benchmarks.command(context_settings=ANOTHER_COMMAND)
def checkouts(
    other: Annotated[Path, typer.Argument(help="Another checkout of this project.")],
    benchmark: Annotated[list[str], typer.Argument(help="A benchmark's name and options.")],
    rounds: Rounds = 3,
) -> None:
    """This code beside another checkout's, in turn: `checkouts ../before engine --part stall`."""
    from checkouts import compare as measure

    running.print_result(measure(other, benchmark, rounds))


@benchmarks.command()
def budgets() -> None:
    """Tokens that agents with prompts of 60k compute on prefix budgets of 20k, 40k and 80k."""
    running.preload()
    from small_budgets import run

    running.show({"turns": [asdict(turns) for turns in run()]})


@benchmarks.command()
def restart() -> None:
    """Tokens that an agent with 60k computes after a restart."""
    running.preload()
    from restart import run

    running.show({"restarts": [asdict(restarted) for restarted in run()]})


@benchmarks.command()
def speculation(
    folder: Checkpoint,
    part: Annotated[
        list[str] | None, typer.Option(help="rows, rewrite; repeatable, both by default.")
    ] = None,
    rows: Annotated[
        list[int] | None, typer.Option(help="Rows that decode together; repeatable. 1 to 16.")
    ] = None,
    draft_tokens: Annotated[int, typer.Option(min=1, max=7, help="Drafts of a row.")] = 7,
    reply: Annotated[int, typer.Option(help="Tokens of each reply.")] = 192,
    rounds: Rounds = 3,
    drafter: Annotated[str, typer.Option(help="Who guesses.")] = "auto",
    draft_model: Annotated[
        str | None, typer.Option(help="Folder of a smaller model, for the drafter `model`.")
    ] = None,
    dtype: Dtype = "float32",
) -> None:
    """Tokens per second of a checkpoint with drafts and without, and of a file rewritten."""
    running.preload()
    from speculation import PARTS, Plan
    from speculation import bench as measure

    parts, count = part or list(PARTS), rows or Plan(folder).rows
    plan = Plan(folder, parts, count, draft_tokens, reply, rounds, dtype, drafter, draft_model)
    running.print_result(measure(plan))
