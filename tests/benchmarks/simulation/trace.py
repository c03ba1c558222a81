"""A trace of one's own: JSON lines of requests, bounded and checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mlx_provider.errors import BadRequest

from .workload import Workload

LINE = 4096
"""Bytes of a line at most."""
LINES = 20_000_000


class Asked(BaseModel):
    """A line of a trace."""

    model_config = ConfigDict(extra="forbid", strict=True)

    time: float = Field(ge=0, le=1e9, allow_inf_nan=False)
    """Seconds; a request goes out then, or once the one before has its answer."""
    session: str = Field(min_length=1, max_length=256)
    prompt: int = Field(ge=1, le=10_000_000)
    """Tokens."""
    answer: int = Field(ge=1, le=10_000_000)
    """Tokens."""
    prefix: str | None = Field(default=None, max_length=256)
    """Which system prompt: sessions of the same name share it. That of a session's first line."""
    prefix_tokens: int = Field(default=0, ge=0, le=10_000_000)
    """Its tokens; of the lines of one prefix, the fewest count."""


def read_trace(path: Path, lines: int = LINES) -> Workload:
    """The workload of a file. Raises `BadRequest` for a line that is none, with its number."""
    try:
        with path.open("rb") as file:
            return workload_of(_rows(file, lines))
    except OSError as error:
        raise BadRequest(f"trace {path}: {error.strerror}", param="trace") from error


def _rows(file: Any, lines: int) -> Iterator[Asked]:
    for number, line in enumerate(iter(lambda: file.readline(LINE + 1), b""), 1):
        if number > lines:
            raise BadRequest(f"the trace has more than {lines} lines", param="trace")
        if len(line) > LINE:
            raise BadRequest(f"line {number} is longer than {LINE} bytes", param="trace")
        if line.strip():
            yield _row(line, number)


def _row(line: bytes, number: int) -> Asked:
    try:
        row = Asked.model_validate_json(line)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in found["loc"]) or "the line"
        raise BadRequest(f"line {number}: {where}: {found['msg']}", param="trace") from None
    if row.prefix_tokens > row.prompt:
        raise BadRequest(f"line {number}: prefix_tokens exceeds prompt", param="trace")
    return row


def workload_of(rows: Iterable[Asked]) -> Workload:
    """Conversations by their first moments, each one's requests by time. Raises `BadRequest` where
    there is none."""
    talks: dict[str, list[tuple[float, int, int]]] = {}
    prefixes: dict[str, int] = {}
    shared: list[int] = []
    prefix_of: dict[str, int] = {}
    for row in rows:
        talk = talks.setdefault(row.session, [])
        talk.append((row.time, row.prompt, row.answer))
        # a session without a named prefix shares with nobody
        name = f"named {row.prefix}" if row.prefix is not None else f"own {row.session}"
        place = prefixes.setdefault(name, len(shared))
        if place == len(shared):
            shared.append(row.prefix_tokens)
        shared[place] = min(shared[place], row.prefix_tokens)
        prefix_of.setdefault(row.session, place)
    if not talks:
        raise BadRequest("the trace has no request", param="trace")
    for talk in talks.values():
        talk.sort(key=lambda asked: asked[0])
    order = sorted(talks, key=lambda session: talks[session][0][0])
    asked = [each for session in order for each in talks[session]]
    first = [0]
    for session in order:
        first.append(first[-1] + len(talks[session]))
    return Workload(
        start=[talks[session][0][0] for session in order],
        first=first,
        prefix=[prefix_of[session] for session in order],
        shared=shared,
        prompt=[prompt for _, prompt, _ in asked],
        answer=[answer for _, _, answer in asked],
        gap=[time for time, _, _ in asked],
        timed=True,
    )
