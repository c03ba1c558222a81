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
    "full": "context full, untold",
    "prefill": "prefill of {prefill:g} s",
}


def written(
    versions: str,
    prefill: float,
    agents: Mapping[str, Mapping[str, Outcome]],
    libraries: Mapping[str, Outcome],
) -> str:
    """The whole file. `agents`: by name and version, then by column."""
    parts = [HEAD, f"{versions}.\n"]
    if agents:
        columns = {name: text.format(prefill=prefill) for name, text in COLUMNS.items()}
        rows = [
            [name, *(_cell(cells.get(column)) for column in columns)]
            for name, cells in agents.items()
        ]
        parts += ["## Coding agents\n", _table(["client", *columns.values()], rows)]
    if libraries:
        rows = [[name, _cell(outcome)] for name, outcome in libraries.items()]
        parts += ["## Python\n", _table(["client", "tool loop"], rows)]
    return "\n".join(parts)


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "–"
    told = outcome.told.replace("|", "\\|").replace("\n", " ")
    return told if outcome.good else f"✗ {told}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
