"""What a running engine does and holds: `mlx-provider top`, `cache` and `metrics`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..errors import BadRequest
from ..isolation import printable
from .engine import ApiBase, ApiKey, ApiKeyFile, finite, http_client, running_engine

if TYPE_CHECKING:
    from ..client.http import HttpClient
    from ..protocol.health import (
        EngineStats,
        MemoryStats,
        PrefixCacheStats,
        RequestStats,
        Stats,
    )

MODEL_WIDTH = 26
TREE = 12
LOOKUPS = 5
STEPS = 60
STATE_STYLES = {"preparing": "dim", "queued": "yellow", "prefill": "cyan", "decode": "green"}
REASONS = {
    "": "all of the stored prefix cached",
    "cold": "no stored prefix",
    "diverged": "differs from the stored prefix",
    "no_state": "no state to resume from",
}


def top(
    once: Annotated[bool, typer.Option("--once", help="Show it once and exit.")] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON: a line for each update, or once."),
    ] = False,
    every: Annotated[
        float,
        typer.Option(min=0.2, max=60, callback=finite, help="Seconds between updates."),
    ] = 1.0,
    api_base: ApiBase = None,
    api_key_file: ApiKeyFile = None,
    api_key: ApiKey = None,
) -> None:
    """Watch requests, prompts, memory and prefix cache of a running engine. Starts no engine.

    Exit code 3: no engine runs.
    """
    client = running_engine(api_base, api_key_file, as_json=as_json)
    try:
        if once or not (as_json or Console().is_terminal):
            stats = client.stats()
            if as_json:
                typer.echo(stats.model_dump_json(indent=2))
            else:
                Console(highlight=False).print(view(stats))
        elif as_json:
            for line in client.watch(every):
                typer.echo(line)
        else:
            _live(client, every)
    except KeyboardInterrupt:
        return
    finally:
        client.close()


def _live(client: HttpClient, every: float) -> None:
    from ..client.messages import parse_stats
    from ..errors import EngineDied

    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            for line in client.watch(every):
                live.update(view(parse_stats(line)), refresh=True)
        except EngineDied:  # an expected end of the engine
            pass
    console.print(f"the engine has ended ({time.strftime('%H:%M:%S')})")


def view(stats: Stats) -> RenderableType:
    parts: list[RenderableType] = [_head(stats), Text(), _memory(stats.memory)]
    parts += [Text(), _requests(stats.requests)]
    for engine in stats.engines:
        parts += [Text(), _engine(engine)]
    parts += [Text(), _cache(stats.prefix_cache)]
    return Group(*parts)


def _head(stats: Stats) -> Text:
    decoded = sum(engine.decoded_per_second for engine in stats.engines)
    prefilled = sum(engine.prefilled_per_second for engine in stats.engines)
    waiting = stats.waiting()
    return Text.assemble(
        (f"mlx-provider {stats.version}", "bold"),
        f" · {printable(stats.device)} · process {stats.pid}\n",
        (f"{len(stats.requests) - waiting} running, {waiting} waiting", "bold"),
        f" · decode {decoded:.0f} tok/s · prefill {prefilled:.0f} tok/s",
    )


def _memory(memory: MemoryStats) -> Text:
    owners = {owner.replace("_", " "): n for owner, n in memory.owners().items() if n}
    return Text(
        f"memory  {size(sum(owners.values()))} of {size(memory.limit)}, "
        f"{size(memory.active)} on the device\n        "
        + ", ".join(f"{owner} {size(nbytes)}" for owner, nbytes in owners.items())
    )


def _requests(requests: Sequence[RequestStats]) -> RenderableType:
    if not requests:
        return Text("no request", style="dim")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("request", "model", "state", "prompt"):
        table.add_column(name, no_wrap=True)
    for name in ("out", "tok/s", "drafts", "waited", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in requests:
        model, cached = printable(each.model), each.cached_tokens
        done = f"{cached + each.prefilled_tokens}/{each.prompt_tokens}"
        table.add_row(
            Text(printable(each.id)[-12:]),
            Text(model if len(model) <= MODEL_WIDTH else f"…{model[1 - MODEL_WIDTH :]}"),
            Text(each.state, style=STATE_STYLES[each.state]),
            f"{done} ({cached} cached)" if cached else done,
            f"{each.completion_tokens}",
            f"{each.tokens_per_second:.1f}" if each.tokens_per_second else "",
            f"{each.accepted_tokens}/{each.drafted_tokens}" if each.drafted_tokens else "",
            f"{each.queued:.1f} s",
            f"{each.age:.1f} s",
        )
    return table


def _engine(engine: EngineStats) -> Text:
    kind = f" ({engine.kind})" if engine.kind else ""
    summary = Text.assemble(
        (printable(f"{engine.model}{kind}"), "bold"),
        f"  {engine.rows} rows, {engine.queued} waiting · {engine.layout}"
        f"{', mixed passes' if engine.mixes else ''}",
    )
    if engine.steps:
        summary.append(f"\n  steps  {1000 * engine.step_median:.1f} ms median, ")
        summary.append(f"{1000 * engine.step_longest:.1f} ms longest")
        if most := max(step.chunk for step in engine.steps[-STEPS:]):
            summary.append(f", chunks up to {most} tokens")
    if engine.drafted_tokens:
        share = engine.accepted_tokens / engine.drafted_tokens
        summary.append(f"\n  drafts {engine.drafter}: {engine.accepted_tokens} of ")
        summary.append(f"{engine.drafted_tokens} accepted ({share:.0%})")
    if engine.ahead_tokens:
        summary.append(f"\n  {engine.ahead_tokens} prompt tokens prefilled in the background")
    return summary


def _cache(cache: PrefixCacheStats) -> Text:
    summary = Text.assemble(
        ("prefix cache", "bold"),
        f"  {cache.entries} entries, {size(cache.bytes)} of {size(cache.budget)} · "
        f"{cache.hit_rate:.0%} of {cache.prompt_tokens} prompt tokens cached",
    )
    for node in cache.tree[:TREE]:
        summary.append(f"\n  {'  ' * min(node.depth, 12)}└ {node.tokens} tokens from {node.start}")
        summary.append(
            f"  {node.hits} hit{'' if node.hits == 1 else 's'}, {size(node.bytes)}", style="dim"
        )
        summary.append("" if node.resumable else ", no state to resume from", style="dim")
    if cache.nodes > TREE:
        summary.append(f"\n  and {cache.nodes - min(TREE, len(cache.tree))} more", style="dim")
    for found in cache.recent[:LOOKUPS]:
        summary.append(f"\n  {found.ago:5.0f} s ago  {printable(found.request)[-12:]}  ")
        summary.append(f"{found.cached_tokens} of {found.prompt_tokens}")
        at = f" at token {found.stored_tokens}" if found.reason == "diverged" else ""
        style = "yellow" if found.reason else "dim"
        summary.append(f"  {REASONS[found.reason]}{at}", style=style)
    return summary


def size(nbytes: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 2**power:
            return f"{nbytes / 2**power:.1f} {unit}"
    return f"{nbytes} B"


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Empty every prefix cache.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    api_base: ApiBase = None,
    api_key_file: ApiKeyFile = None,
    api_key: ApiKey = None,
) -> None:
    """Show what the prefix cache of a running engine holds, or empty it.

    Exit code 3: no engine runs.
    """
    import yaml

    client = running_engine(api_base, api_key_file, as_json=as_json)
    if clear:
        client.cache_clear()
    report = client.cache_report()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    lines = yaml.safe_dump(report, sort_keys=False) if report else "the prefix cache is empty\n"
    typer.echo(lines, nl=False)


def metrics(
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Serve them on this port until Ctrl-C; 0: any free one."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="With --port: address to listen on.")] = "127.0.0.1",
    no_key: Annotated[
        bool, typer.Option("--no-key", help="With --port, on loopback: scrapes need no key.")
    ] = False,
    api_base: ApiBase = None,
    api_key_file: ApiKeyFile = None,
    api_key: ApiKey = None,
) -> None:
    """Print the metrics of a running engine, or serve them to Prometheus. Starts no engine.

    Exit code 3: no engine runs.
    """
    connect = http_client if port is not None else partial(running_engine, err=True)
    client = connect(api_base, api_key_file)
    try:
        if port is None:
            typer.echo(client.metrics(), nl=False)
        else:
            _serve(client, host, port, keyless=no_key)
    except KeyboardInterrupt:
        return
    finally:
        client.close()


def _serve(client: HttpClient, host: str, port: int, *, keyless: bool) -> None:
    from ..client.messages import is_loopback
    from ..config import engine_settings
    from ..server.access import Key, ensure_key, own_key_file, own_names
    from ..server.metrics_page import metrics_page, serve_page

    if keyless and not is_loopback(host):
        raise BadRequest(f"on {host} metrics need a key: omit --no-key", param="no_key")
    keys, summary, file = None, "no key", own_key_file(name="metrics.key")
    if not keyless:
        remedy = "set XDG_CONFIG_HOME to a folder of yours, or add --no-key"
        keys, summary = [Key(ensure_key(file, remedy))], f"key: {file}"
    page = metrics_page(client, keys, own_names(host) | set(engine_settings().allowed_hosts))
    announce = lambda address: typer.echo(f"metrics on {address}/metrics · {summary}")  # noqa: E731
    serve_page(page, host, port, announce)
