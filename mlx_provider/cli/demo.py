"""`mlx-provider demo`: engine, proxy and an OpenAI client, end to end, with no download."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ..demo.scenario import Check, Measured
    from ..demo.stage import Stage

NEXT = """
[bold]mlx-provider up demo[/bold] starts the same to stay, and prints what your own client needs.
Coding agents need a larger model: [bold]mlx-provider[/bold] alone names two for this machine."""


def demo() -> None:
    """Serve the shipped model through a LiteLLM proxy and talk to it.

    Exit code 0: every answer was right; 1: an answer was wrong; 130: Ctrl-C.
    """
    from ..demo.stage import stage
    from ..gateway.foreground import Ended, ending_by_signal

    console = Console(highlight=False)
    code = 1
    try:
        console.print("starting an engine process and a LiteLLM proxy ...", style="dim")
        start = time.monotonic()
        with ending_by_signal(), stage() as running:
            console.print(f"ready after {time.monotonic() - start:.1f} s\n", style="dim")
            code = 0 if _perform(running, console) else 1
        console.print(NEXT, soft_wrap=True)
    except Ended as ended:
        console.print("\nstopped", style="dim")
        code = 128 + ended.number
    raise typer.Exit(code)


def _perform(running: Stage, console: Console) -> bool:
    """Returns whether every check passed."""
    import openai

    from ..demo.scenario import RECALL, STREAMED, Scenario
    from ..demo.stage import MODEL

    with openai.OpenAI(
        base_url=f"{running.proxy.url}/v1",
        api_key=running.proxy.key,
        http_client=openai.DefaultHttpxClient(trust_env=False),  # loopback needs no proxy
    ) as client:
        scenario = Scenario(client, MODEL)
        console.print(Text(f"> {STREAMED}", style="bold"))
        story, same = scenario.story(lambda piece: console.print(piece, end="", soft_wrap=True))
        console.print(Text(f"\n\n> {RECALL}", style="bold"))
        recall, recalled = scenario.recall()
        console.print(Text(recall.text), "\n")
        checks = [same, recalled, *scenario.at_once(), scenario.see()]
    console.print(_account(running, story, recall))
    console.print(_drafts(running))
    for check in checks:
        _print_check(check, console)
    return all(check.passed for check in checks)


def _account(running: Stage, story: Measured, recall: Measured) -> Table:
    health = running.health()
    model = health.models[0]
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in {
        "model": f"{model.model} ({model.model_type}, {model.weights_bytes / 1e6:.1f} MB)",
        "family": f"{model.family}, by {model.plugin}",
        "device": f"{health.device}, BLAS: {health.blas}",
        "time to first token": f"{recall.first_token * 1000:.0f} ms (second turn)",
        "speed": f"{story.tokens_per_second:.0f} tok/s",
        "reused on the second turn": f"{recall.cached_tokens} of {recall.prompt_tokens} tokens",
    }.items():
        table.add_row(Text(name, style="dim"), Text(value))
    return table


def _drafts(running: Stage) -> Table:
    drafter, usage = running.drafted()
    accepted = f"{usage.accepted_tokens} of {usage.drafted_tokens} drafted tokens accepted"
    summary = accepted if usage.drafted_tokens else "none: a draft takes longer than it saves here"
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=len("reused on the second turn"))
    table.add_row(Text("drafts", style="dim"), Text(f"{summary} (demo-hybrid, by {drafter})"))
    return table


def _print_check(check: Check, console: Console) -> None:
    mark, style = ("ok", "green") if check.passed else ("failed", "red")
    console.print(Text(mark, style=style), Text(check.claim), end="")
    console.print("" if check.passed else Text(f" - answered {check.answer!r}", style="red"))
