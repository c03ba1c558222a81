"""`mlx-provider eval`: find the best model, parser, options and context for a machine.

| module | is about |
|---|---|
| `subjects` | models with their options and variables, as requested |
| `stage` | one gateway for them, and its client: `asking` |
| `scenario`, `scenarios/` | requests with their expected replies, as data |
| `matching`, `scoring` | whether a reply is right, and its faults |
| `playing`, `tools`, `tools_report` | a scenario turn by turn; all scenarios, counted by kind |
| `haystack`, `needle`, `needle_report` | long prompts with one fact to find |
| `running`, `screen` | subject after subject, until a signal ends it |
| `conditions`, `report` | the conditions of a figure, and its tables |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_provider import hookimpl

if TYPE_CHECKING:
    import typer

mlx_provider_api = 1


@hookimpl
def mlx_register_commands(cli: typer.Typer) -> None:
    from .commands import evaluate

    cli.add_typer(evaluate, name="eval")
