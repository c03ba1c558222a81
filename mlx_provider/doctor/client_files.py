"""The server that each known client would ask, by its variables and files. Changes nothing.

The clients' records in the plugins name the places.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..isolation import Isolation
from ..records import Client, ClientServer, ClientSettings, Profile
from ..safe_open import read_bounded

LARGEST = 2**22
"""Bytes of a client's file."""


@dataclass(frozen=True)
class Target:
    """A server that a client would ask."""

    client: str
    source: str
    """The variable or file that says so."""
    url: str
    context: int | None = None
    """Tokens that the client takes the model's context to have."""


@dataclass(frozen=True)
class Unread:
    """A file of a client that could not be read."""

    client: str
    path: Path
    why: str


ANY = Client(
    "openai",
    command="",
    install="",
    profile=lambda gateway: Profile(),
    serves="clients of OpenAI's API",
    settings=ClientSettings(("OPENAI_BASE_URL", "OPENAI_API_BASE")),
)
"""Programs that nobody has a record of."""


def targets(
    clients: Iterable[Client], environ: Mapping[str, str], home: Path
) -> Iterator[Target | Unread]:
    """The servers of all clients, and the files that could not be read."""
    for client in (*clients, ANY):
        settings = client.settings
        for name in settings.variables:
            if url := environ.get(name):
                told = environ.get(settings.window, "")
                yield Target(_shown(client), name, url, int(told) if told.isdigit() else None)
        for path in _paths(settings, environ, home):
            yield from _read(client, path)


def _shown(client: Client) -> str:
    return client.serves or client.name


def _paths(settings: ClientSettings, environ: Mapping[str, str], home: Path) -> Iterator[Path]:
    for file in settings.files:
        head, _, rest = file.partition("/")
        if not head.startswith("$"):
            yield home / file
        elif folder := environ.get(head[1:]):
            yield Path(folder) / rest
            return  # in place of the one below the home folder


def _read(client: Client, path: Path) -> Iterator[Target | Unread]:
    try:
        content = _parsed(path)
    except FileNotFoundError:
        return
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        yield Unread(_shown(client), path, _line(error))
        return
    named: list[ClientServer] = []
    with Isolation() as reading:
        named += client.settings.servers(content if isinstance(content, Mapping) else {})
    if reading.fault is not None:
        yield Unread(_shown(client), path, _line(reading.fault.summary))
    for server in named:
        yield Target(_shown(client), str(path), server.url, server.context)


def _line(told: object) -> str:
    return " ".join(str(told).split())[:200]


def _parsed(path: Path) -> Any:
    text = read_bounded(path, LARGEST).decode()
    if path.suffix == ".toml":
        return tomllib.loads(text)
    return yaml.safe_load(text) if path.suffix in (".yaml", ".yml") else json.loads(text)
