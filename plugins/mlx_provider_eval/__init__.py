"""`mlx-provider eval`: which model, parser, option and context serve this user on this machine.

| module | is about |
|---|---|
| `subjects` | models with their options and variables, as they were asked for |
| `stage` | one gateway for them, and who asks it: `asking` |
| `scenario`, `scenarios/` | what is asked, with its check as data |
| `matching`, `scoring` | whether a reply is right, and what is wrong with it |
| `playing`, `tools`, `tools_report` | a scenario turn by turn; all of them, counted by kind |
| `haystack`, `needle`, `needle_report` | prompts that hold one thing to be found |
| `running`, `screen` | subject after subject, until a signal ends it |
| `conditions`, `report` | what a figure depends on, and how it is shown |
| `tool_eval_bench` | the same gateway for another project's scenarios |
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
