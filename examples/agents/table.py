"""What was found, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scenarios import Outcome

HEAD = """\
# Clients

Real clients against a real LiteLLM proxy, with a model that says and calls what it is told
(`mlx_provider.testing.scripted`). This file is written by

```sh
tox -e agents -- --write
```

Every client has an empty home and reaches nothing but loopback. A cell with ✗ is a failure.
"""
COLUMNS = {
    "plain": "answer",
    "tools": "tool loop, two calls at once",
    "cached": "least share of a later turn's prompt that was cached",
    "cancel": "Ctrl-C in a reply",
    "told": "context full",
    "untold": "context full, the client takes it for 200k",
    "prefill": "prefill of {prefill:g} s",
}


def written(versions: str, prefill: float, rows: Mapping[str, Mapping[str, Outcome]]) -> str:
    """The whole file. `rows`: by name and version, then by column."""
    columns = {name: text.format(prefill=prefill) for name, text in COLUMNS.items()}
    agents = [
        [name, *(_cell(cells.get(column)) for column in columns)]
        for name, cells in rows.items()
        if "library" not in cells
    ]
    libraries = [
        [name, _cell(cells["library"])] for name, cells in rows.items() if "library" in cells
    ]
    parts = [HEAD, f"{versions}.\n"]
    if agents:
        parts += ["## Coding agents\n", _table(["client", *columns.values()], agents)]
    if libraries:
        parts += ["## Python\n", _table(["client", "tool loop"], libraries)]
    return "\n".join(parts)


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "–"
    told = outcome.told.replace("|", "\\|").replace("\n", " ")
    return told if outcome.good else f"✗ {told}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
