"""Results as tables for a terminal, and as Markdown and JSON files on request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_provider.errors import BadRequest

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def fenced(value: Any) -> str:
    text = json.dumps(value, indent=1, ensure_ascii=False)
    fence = "`" * max(3, 1 + max(map(len, _ticks(text)), default=0))
    return f"{fence}json\n{text}\n{fence}"


def _ticks(text: str) -> list[str]:
    return ["`" * n for n in range(3, 9) if "`" * n in text]


def surroundings(result: Result) -> str:
    """The conditions of the run: command, machine, versions, subjects."""
    lines = [f"- command: `{result['command']}`", f"- at {result['at']} on {result['machine']}"]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    lines.append(f"- {versions}, Python {result['python']}")
    lines += [f"- {_served(each)}" for each in result["subjects"]]
    return "\n".join(lines)


def _served(subject: Result) -> str:
    if subject.get("skipped"):
        return f"`{subject['label']}`: not measured: {subject['skipped']}"
    parser = subject["tool_parser"] or "none"
    chosen = {**subject["options"], **subject["environment"]}
    notes = "".join(f"; {name}={value}" for name, value in chosen.items())
    notes += "".join(f"; {note}" for note in subject["notes"])
    return (
        f"`{subject['label']}`: {subject['model_type']} by family {subject['family']}, "
        f"{subject['weights_bytes'] / 1e6:.1f} MB, context {subject['context_length']:,}, "
        f"tool parser {parser}, on {subject['device']}{notes}"
    )


def measured_of(result: Result) -> list[Result]:
    return [each for each in result["subjects"] if not each.get("skipped")]


def require_writable(folder: Path, option: str) -> None:
    """Raise `BadRequest` before a run, which can take an hour."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".written").touch()
        (folder / ".written").unlink()
    except OSError as error:
        raise BadRequest(f"{option} {folder}: {error.strerror}", param=option) from None


def write(folder: Path, name: str, result: Result, markdown: str) -> None:
    """Write `name.json` and `name.md`."""
    texts = {".json": json.dumps(result, indent=1, ensure_ascii=False) + "\n", ".md": markdown}
    for ending, text in texts.items():
        (folder / f"{name}{ending}").write_text(text, encoding="utf-8")
