"""`mlx-provider plan`: a model on machines, before anyone buys them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ..planning import Plan
    from ..planning.group import Rank
    from ..planning.plan import Outlook

TOP = 10_000_000
"""Tokens beyond which a context is a slip of the pen."""


def plan(
    model: Annotated[str, typer.Argument(help="A model folder, its config.json, or a Hub id.")],
    machines: Annotated[
        str, typer.Option(help="`m4-max-128gb x2`, or `2x64GB:400GB/s`; several by commas.")
    ],
    link: Annotated[
        str,
        typer.Option(help="jaccl, ring-thunderbolt, ring-10gbe, loopback, or `100us:5GB/s`."),
    ] = "jaccl",
    context: Annotated[
        int | None,
        typer.Option(min=1, max=TOP, help="Tokens of a request; else 32,768 or the model's own."),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, max=1024, help="Requests at once.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Estimate what a model needs of each machine and how fast they could be. Runs nothing."""
    from .. import planning

    asked = planning.subject(model)
    load = planning.usual_load(asked, context, rows)
    found = planning.plan(asked, planning.machines(machines), planning.link(link), load)
    if as_json:
        typer.echo(json.dumps(planning.as_json(found), indent=2))
    else:
        _show(found, Console(highlight=False))


def _show(found: Plan, console: Console) -> None:
    from ..planning.report import NATURE, basis

    load = found.load
    asked = f"{load.rows} x {load.context:,} tokens"
    console.print(Text(f"{found.subject.name}, {asked}: {NATURE}"))
    console.print(_memory(found))
    console.print(_speed(found))
    console.print(Text(_exchanged(found), style="dim"))
    console.print(Text(found.verdict, style="bold"))
    for line in basis(found):
        console.print(Text(line, style="dim"))


def _memory(found: Plan) -> Table:
    made = Table(box=None, pad_edge=False)
    for name in ("rank", "machine", "for MLX", "weights", "KV per token", "requests", ""):
        made.add_column(name, justify="left" if name in ("machine", "") else "right")
    for rank in found.all.group.ranks:
        made.add_row(*_cells(found, rank))
    return made


def _cells(found: Plan, rank: Rank) -> tuple[str | Text, ...]:
    from ..gateway.models import size

    load = found.load
    fits = rank.fits(load.context, load.rows)
    return (
        str(rank.number),
        rank.machine.name,
        size(rank.machine.room),
        size(rank.weights),
        f"{rank.need.kv_per_token:,} B",
        size(rank.takes(load.context, load.rows) - rank.weights),
        Text("fits", style="green") if fits else Text("does not fit", style="bold red"),
    )


def _speed(found: Plan) -> Table:
    made = Table(box=None, pad_edge=False)
    for name in ("at best", "fits", "context", "decode tok/s", "of a step: memory", "link"):
        made.add_column(name, justify="left" if name in ("at best", "fits") else "right")
    made.add_column("prompt", justify="right")
    count = len(found.all.group.ranks)
    made.add_row(*_speeds("these machines" if count > 1 else "this machine", found.all))
    if count > 1:
        made.add_row(*_speeds("one of them", found.alone))
    return made


def _speeds(name: str, of: Outlook) -> tuple[str, ...]:
    if not of.fits:
        return (name, "no", f"{of.longest:,}", *4 * ["-"])
    return (
        name,
        "yes",
        f"{of.longest:,}",
        f"{of.tokens_per_second:.1f}",
        f"{1000 * of.reading:.1f} ms",
        f"{1000 * of.exchanging:.1f} ms",
        f"{of.prompt_seconds:.1f} s",
    )


def _exchanged(found: Plan) -> str:
    group = found.all.group
    if len(group.ranks) == 1:
        return "one machine exchanges nothing"
    layers = [str(len(each)) for each in group.split.layers]
    split = f"{', '.join(layers)} layers by rank, one after another; " if layers else ""
    return split + (
        f"{group.collectives} collectives a step, {group.token_bytes:,} bytes a token; "
        f"{group.prompt_token_bytes:,} bytes a token of a prompt"
    )
