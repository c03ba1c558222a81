"""The figures of an engine for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..protocol.health import (
    EngineFigures,
    Figures,
    Lookup,
    MemoryFigures,
    PrefixCacheFigures,
    RequestFigures,
    StepFigures,
)

BAR = 48
MODEL_WIDTH = 26
TREE = 12
MISSES = 5
STEPS = 60
BLOCKS = "▁▂▃▄▅▆▇█"
STATE_STYLES = {"preparing": "dim", "queued": "yellow", "prefill": "cyan", "decode": "green"}
OWNER_STYLES = {
    "weights": "blue",
    "drafters": "magenta",
    "rows": "green",
    "prefix_cache": "cyan",
    "features": "yellow",
    "media": "red",
    "pool": "bright_black",
}
REASONS = {
    "": "found all that is stored of it",
    "cold": "nothing stored begins like it",
    "diverged": "left what is stored",
    "no_state": "a pass cannot go on from there",
}


def view(figures: Figures) -> RenderableType:
    parts: list[RenderableType] = [_head(figures), Text(), _memory(figures.memory)]
    parts += [Text(), _requests(figures.requests) if figures.requests else _quiet()]
    for engine in figures.engines:
        parts += [Text(), _engine(engine)]
    parts += [Text(), _cache(figures.prefix_cache)]
    return Group(*parts)


def _head(figures: Figures) -> Text:
    decoded = sum(engine.decoded_per_second for engine in figures.engines)
    prefilled = sum(engine.prefilled_per_second for engine in figures.engines)
    waiting = figures.waiting()
    return Text.assemble(
        (f"mlx-provider {figures.version}", "bold"),
        f" · {plain(figures.device)} · process {figures.pid}\n",
        (f"{len(figures.requests) - waiting} run, {waiting} wait", "bold"),
        f" · decode {decoded:.0f} tok/s · prefill {prefilled:.0f} tok/s",
    )


def _quiet() -> Text:
    return Text("no request", style="dim")


def _memory(memory: MemoryFigures) -> Text:
    owners = memory.owners()
    held = sum(owners.values())
    shown, legend = Text("memory  "), Text("        ")
    whole, used = max(memory.limit, held, 1), 0
    for owner, style in OWNER_STYLES.items():
        if nbytes := owners[owner]:
            width = max(1, round(BAR * nbytes / whole))
            used += width
            shown.append("█" * width, style=style)
            name = owner.replace("_", " ")
            legend.append("■ ", style=style).append(f"{name} {size(nbytes)}  ")
    shown.append("░" * max(0, BAR - used), style="dim")
    shown.append(f"  {size(held)} of {size(memory.limit)}, {size(memory.active)} on the device\n")
    return shown.append_text(legend)


def _requests(requests: Sequence[RequestFigures]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("request", "model", "state"):
        table.add_column(name, no_wrap=True, max_width=MODEL_WIDTH)
    table.add_column("prompt", no_wrap=True)
    for name in ("out", "tok/s", "drafts", "waited", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in requests:
        table.add_row(
            Text(plain(each.id)[-12:]),
            Text(_tail(plain(each.model))),
            Text(each.state, style=STATE_STYLES[each.state]),
            _prompt(each),
            f"{each.completion_tokens}",
            f"{each.tokens_per_second:.1f}" if each.tokens_per_second else "",
            f"{each.accepted_tokens}/{each.drafted_tokens}" if each.drafted_tokens else "",
            f"{each.queued:.1f} s",
            f"{each.age:.1f} s",
        )
    return table


def _tail(name: str) -> str:
    return name if len(name) <= MODEL_WIDTH else f"…{name[1 - MODEL_WIDTH :]}"


def _prompt(request: RequestFigures) -> Text:
    """Tokens from the prefix cache, computed, and left."""
    whole, width = max(1, request.prompt_tokens), 16
    cached = round(width * request.cached_tokens / whole)
    done = round(width * (request.cached_tokens + request.prefilled_tokens) / whole)
    done = min(width, done)
    return Text.assemble(
        ("█" * cached, "cyan"),
        ("█" * (done - cached), "green"),
        ("░" * (width - done), "dim"),
        f" {request.prompt_tokens}",
        (f" ({request.cached_tokens} cached)" if request.cached_tokens else "", "dim"),
    )


def _engine(engine: EngineFigures) -> Text:
    kind = f" ({engine.kind})" if engine.kind else ""
    summary = Text.assemble(
        (plain(f"{engine.model}{kind}"), "bold"),
        f"  {engine.rows} rows, {engine.queued} wait · {engine.layout}"
        f"{', prompts in their pass' if engine.mixes else ''}",
    )
    if engine.steps:
        summary.append(f"\n  steps  {_milli(engine.step_median)} median, ")
        summary.append(f"{_milli(engine.step_longest)} longest\n  chunks ")
        summary.append_text(_chunks(engine.steps[-STEPS:]))
    if engine.drafted_tokens:
        share = engine.accepted_tokens / engine.drafted_tokens
        summary.append(f"\n  drafts {engine.drafter}: {engine.accepted_tokens} of ")
        summary.append(f"{engine.drafted_tokens} held ({share:.0%})")
    if engine.ahead_tokens:
        summary.append(f"\n  {engine.ahead_tokens} prompt tokens computed while tools ran")
    return summary


def _chunks(steps: Sequence[StepFigures]) -> Text:
    """A block per step, as high as its chunk. Another colour: the chunk shared the pass of the
    rows."""
    most, shown = max(step.chunk for step in steps), Text()
    for step in steps:
        if step.chunk:
            level = min(len(BLOCKS) - 1, len(BLOCKS) * step.chunk // max(1, most))
            shown.append(BLOCKS[level], style="magenta" if step.mixed else "cyan")
        else:
            shown.append("·", style="dim")
    return shown.append(f" up to {most} tokens" if most else "", style="dim")


def _cache(cache: PrefixCacheFigures) -> Text:
    summary = Text.assemble(
        ("prefix cache", "bold"),
        f"  {cache.entries} entries, {size(cache.bytes)} of {size(cache.budget)} · "
        f"{cache.hit_rate:.0%} of {cache.prompt_tokens} prompt tokens found",
    )
    for node in cache.tree[:TREE]:
        summary.append(f"\n  {'  ' * min(node.depth, 12)}└ {node.tokens} tokens from {node.start}")
        summary.append(
            f"  {node.hits} hit{'' if node.hits == 1 else 's'}, {size(node.bytes)}", style="dim"
        )
        summary.append("" if node.resumable else ", no state at its end", style="dim")
    if cache.nodes > TREE:
        summary.append(f"\n  and {cache.nodes - min(TREE, len(cache.tree))} more", style="dim")
    for found in cache.recent[:MISSES]:
        summary.append_text(_lookup(found))
    return summary


def _lookup(found: Lookup) -> Text:
    summary = Text(f"\n  {found.ago:5.0f} s ago  {plain(found.request)[-12:]}  ")
    summary.append(f"{found.cached_tokens} of {found.prompt_tokens}")
    style = "yellow" if found.reason else "dim"
    at = f" at token {found.stored_tokens}" if found.reason == "diverged" else ""
    return summary.append(f"  {REASONS[found.reason]}{at}", style=style)


def _milli(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def size(nbytes: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 2**power:
            return f"{nbytes / 2**power:.1f} {unit}"
    return f"{nbytes} B"


def plain(text: str) -> str:
    """Without control characters: names come from others, and must not control the terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)
