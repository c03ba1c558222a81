"""What was found, as Markdown."""

from collections.abc import Mapping, Sequence

from scenarios import Outcome

HEAD = """\
# Clients

Real clients against a real LiteLLM proxy with a scripted model (`mlx_provider.testing.scripted`).
This command writes the file:

```sh
tox -e agents -- --write
```

Every client has an empty home folder and needs only loopback. ✗ marks a failure, which the command
expects from then on: it exits with 1 if a cell gets better or worse than here.

- Tool loop: one call, then two calls at once that each write a file, then an answer.
- Context full: twelve tool results that do not fit into the context. `compacts and goes on`: the
  client makes all calls and gets the answer. `says so`: it ends and names the reason. Unknown
  limit: the client assumes a context of 200,000 tokens.
- Long prefill: the first answer to a prompt whose prefill takes this time. All clients wait at
  the same time.
"""
COLUMNS = {
    "plain": "answer",
    "tools": "tool loop, two calls at once",
    "cached": "cached of later turns, at least",
    "cancel": "Ctrl-C in a reply",
    "told": "context full",
    "untold": "context full, unknown limit",
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


def changes(committed: str, found: Mapping[str, Mapping[str, Outcome]]) -> list[str]:
    """Cells of a run that are good where those of the committed table fail, or the other way. A
    client that the table does not have must be good."""
    rows = [line.strip("| ").split(" | ") for line in committed.splitlines() if line[:2] == "| "]
    failed = {
        (row[0], at)
        for row in rows
        for at, cell in zip(COLUMNS, row[1:], strict=False)
        if cell[:1] == "✗"
    }
    places = ((name, at, cell) for name, cells in found.items() for at, cell in cells.items())
    return [
        f"{name}, {COLUMNS.get(at, 'tool loop')}: {cell.told}"
        for name, at, cell in places
        if cell.good == ((name, "plain" if at == "library" else at) in failed)
    ]


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "–"
    told = outcome.told.replace("|", "\\|").replace("\n", " ")
    return told if outcome.good else f"✗ {told}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
