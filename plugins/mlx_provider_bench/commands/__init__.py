"""The commands of `bench`: measurements that anyone can repeat; the last line is JSON."""

from __future__ import annotations

import typer

from .behind_proxy import gateway
from .checkouts import checkouts
from .compare import compare, model, report
from .drafting import drafts, sparse, speculation
from .fleet import fleet, router
from .inside import device, engine, grammar
from .ranked import ranks
from .reuse import prefix, traffic, vision
from .simulated import fleet_simulation

ANOTHER_COMMAND = {"allow_interspersed_args": False, "ignore_unknown_options": True}
"""What follows the arguments is another command's."""

bench = typer.Typer()
for command in (
    engine,
    device,
    traffic,
    prefix,
    vision,
    grammar,
    compare,
    report,
    model,
    gateway,
    fleet,
    fleet_simulation,
    router,
    ranks,
    speculation,
    drafts,
    sparse,
):
    bench.command()(command)
bench.command(context_settings=ANOTHER_COMMAND)(checkouts)
