"""The list of the benchmarks that developers run; the last line of each is JSON."""

from __future__ import annotations

import typer

from mlx_provider_bench.group import LongGroup

from .behind_proxy import gateway
from .checkouts import checkouts
from .comparing import compare, engine, model, report
from .drafting import calls, drafts, sparse, speculation
from .inside import accounts, gap
from .reuse import budgets, restart, stays, turns

ANOTHER_COMMAND = {"allow_interspersed_args": False, "ignore_unknown_options": True}
"""What follows the arguments is another command's."""

benchmarks = typer.Typer(cls=LongGroup, no_args_is_help=True, help=__doc__)
for command in (
    compare,
    report,
    model,
    engine,
    accounts,
    budgets,
    stays,
    restart,
    turns,
    gap,
    gateway,
    speculation,
    calls,
    drafts,
    sparse,
):
    benchmarks.command()(command)
benchmarks.command(context_settings=ANOTHER_COMMAND)(checkouts)
