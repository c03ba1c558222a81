"""Commands that show the state of a running engine: `mlx-provider top`, `cache` and `metrics`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..errors import EngineUnavailable
from ..logs import format_size, printable
from .engine import ApiBase, ApiKeyFile, AsJson, client_of_running

if TYPE_CHECKING:
    from ..client.http import HttpClient
    from ..protocol.health import EngineStats, MemoryStats, PrefixCacheStats, RequestStats, Stats

UPDATE_SECONDS = 1.0
MODEL_WIDTH = 26
STATE_STYLES = {"preparing": "dim", "queued": "yellow", "prefill": "cyan", "decode": "green"}


def top(
    once: Annotated[bool, typer.Option("--once", help="Show it once and exit.")] = False,
    as_json: AsJson = False,
    api_base: ApiBase = None,
    api_key_file: ApiKeyFile = None,
) -> None:
    """Watch requests, prompts, memory and prefix cache of a running engine. Starts no engine.

    Exit code 3: no engine runs."""
    client = client_of_running(api_base, api_key_file, as_json=as_json)
    console = Console(highlight=False)
    if as_json:
        typer.echo(client.stats().model_dump_json(indent=2))
    elif once or not console.is_terminal:
        console.print(render_stats(client.stats()))
    else:
        with suppress(KeyboardInterrupt):
            _watch(client, console)


def _watch(client: HttpClient, console: Console) -> None:
    """Refresh the view until the engine stops answering."""
    stats = client.stats()
    screen = Live(console=console, screen=True, auto_refresh=False)
    try:
        with screen as live:
            while True:
                live.update(render_stats(stats), refresh=True)
                time.sleep(UPDATE_SECONDS)
                stats = client.stats()
    except EngineUnavailable as error:
        console.print(f"{time.strftime('%H:%M:%S')} {error.message}")


def render_stats(stats: Stats) -> RenderableType:
    parts: list[RenderableType] = [_head(stats), _memory(stats.memory), _requests(stats.requests)]
    parts += [*map(_engine, stats.engines), _cache(stats.prefix_cache)]
    return Group(*(line for part in parts for line in (part, Text())))


def _head(stats: Stats) -> Text:
    decoded = sum(engine.decoded_per_second for engine in stats.engines)
    prefilled = sum(engine.prefilled_per_second for engine in stats.engines)
    waiting = stats.waiting()
    return Text(
        f"mlx-provider {stats.version} · {printable(stats.device)} · process {stats.pid}\n"
        f"{len(stats.requests) - waiting} running, {waiting} waiting · decode {decoded:.0f} tok/s"
        f" · prefill {prefilled:.0f} tok/s",
        style="bold",
    )


def _memory(memory: MemoryStats) -> Text:
    owners = {owner.replace("_", " "): n for owner, n in memory.owners().items() if n}
    return Text(
        f"memory  {format_size(sum(owners.values()))} of {format_size(memory.limit)}, "
        f"{format_size(memory.active)} on the device\n        "
        + ", ".join(f"{owner} {format_size(nbytes)}" for owner, nbytes in owners.items())
    )


def _requests(requests: Sequence[RequestStats]) -> RenderableType:
    if not requests:
        return Text("no request", style="dim")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("request", "model", "state", "prompt"):
        table.add_column(name, no_wrap=True)
    for name in ("out", "tok/s", "drafts", "waited", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    for request in requests:
        model, cached = printable(request.model), request.cached_tokens
        done = f"{cached + request.prefilled_tokens}/{request.prompt_tokens}"
        table.add_row(
            Text(printable(request.id)[-12:]),
            Text(model if len(model) <= MODEL_WIDTH else f"…{model[1 - MODEL_WIDTH :]}"),
            Text(request.state, style=STATE_STYLES[request.state]),
            f"{done} ({cached} cached)" if cached else done,
            f"{request.completion_tokens}",
            f"{request.tokens_per_second:.1f}" if request.tokens_per_second else "",
            f"{request.accepted_tokens}/{request.drafted_tokens}" if request.drafted_tokens else "",
            f"{request.queued:.1f} s",
            f"{request.age:.1f} s",
        )
    return table


def _engine(engine: EngineStats) -> Text:
    kind = f" ({engine.kind})" if engine.kind else ""
    lines = [f"{engine.rows} rows, {engine.queued} waiting · {engine.layout}"]
    if drafted := engine.drafted_tokens:
        accepted = engine.accepted_tokens
        share = f"{accepted} of {drafted} accepted ({accepted / drafted:.0%})"
        lines.append(f"drafts {engine.drafter}: {share}")
    if engine.background_tokens:
        lines.append(f"{engine.background_tokens} prompt tokens prefilled in the background")
    title = (printable(f"{engine.model}{kind}"), "bold")
    return Text.assemble(title, "  ", "\n  ".join(lines))


def _cache(cache: PrefixCacheStats) -> Text:
    line = (
        f"{cache.entries} entries, {format_size(cache.bytes)} of {format_size(cache.budget)} · "
        f"{cache.hit_rate:.0%} of {cache.prompt_tokens} prompt tokens cached"
    )
    return Text.assemble(("prefix cache", "bold"), "  ", line)


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Empty the prefix cache.")] = False,
    as_json: AsJson = False,
    api_base: ApiBase = None,
    api_key_file: ApiKeyFile = None,
) -> None:
    """Show what the prefix cache of a running engine holds, or empty it.

    Exit code 3: no engine runs."""
    import yaml

    client = client_of_running(api_base, api_key_file, as_json=as_json)
    if clear:
        client.cache_clear()
    report = client.cache_report()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    lines = yaml.safe_dump(report, sort_keys=False) if report else "the prefix cache is empty\n"
    typer.echo(lines, nl=False)


def metrics(api_base: ApiBase = None, api_key_file: ApiKeyFile = None) -> None:
    """Print the metrics of a running engine, as Prometheus reads them. Starts no engine.

    Exit code 3: no engine runs."""
    typer.echo(client_of_running(api_base, api_key_file, err=True).metrics(), nl=False)
