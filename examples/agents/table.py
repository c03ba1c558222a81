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

Every client has an empty home and needs nothing but loopback. A cell with ✗ is a failure.

- Tool loop: one call, then two at once, each of which writes a file; then an answer.
- Context full: twelve tool results that do not fit into it. `compacts and goes on`: all calls are
  made and the answer comes; `says so`: it ends, and names the reason. Untold, it takes the context
  for 200,000 tokens.
- The long prefill: the first answer to a prompt that is computed for so long; all clients wait side
  by side.
"""
COLUMNS = {
    "plain": "answer",
    "tools": "tool loop, two calls at once",
    "cached": "cached of later turns, at least",
    "cancel": "Ctrl-C in a reply",
    "told": "context full",
    "untold": "context full, untold",
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
