"""Clients on this machine that are set to a server: whether it runs, and suits them. The variables
and files in the clients' records are only read."""

from __future__ import annotations

import json
import socket
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from ..client.stream_connection import is_loopback
from ..families.checkpoint import named_context
from ..families.estimate import text_fields
from ..isolation import Isolation
from ..records import Client, ClientServer, ClientSettings, Profile
from ..safe_open import read_bounded
from .checkpoint import AGENT
from .findings import Finding
from .subject import Subject

REACH = 0.5
"""Seconds within which a server on this machine must answer."""
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
LAUNCH = "start the proxy there, or begin the client with an address that is served"
LARGEST = 2**22
"""Bytes of a client's file."""


@dataclass(frozen=True)
class Target:
    """A server that a client is set to."""

    client: str
    source: str
    """Variable or file."""
    url: str
    context: int | None = None
    """Tokens of context that the client assumes."""


@dataclass(frozen=True)
class Unread:
    """A client's file that could not be read."""

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
"""For programs without a record."""


def targets(
    clients: Iterable[Client], environ: Mapping[str, str], home: Path
) -> Iterator[Target | Unread]:
    for client in (*clients, ANY):
        settings = client.settings
        for name in settings.variables:
            if url := environ.get(name):
                told = environ.get(settings.window, "")
                yield Target(_title(client), name, url, int(told) if told.isdigit() else None)
        for path in _paths(settings, environ, home):
            yield from _read(client, path)


def _title(client: Client) -> str:
    return client.serves or client.name


def _paths(settings: ClientSettings, environ: Mapping[str, str], home: Path) -> Iterator[Path]:
    for file in settings.files:
        head, _, rest = file.partition("/")
        if not head.startswith("$"):
            yield home / file
        elif folder := environ.get(head[1:]):
            yield Path(folder) / rest
            return  # it replaces the one below the home folder


def _read(client: Client, path: Path) -> Iterator[Target | Unread]:
    try:
        content = _parsed(path)
    except FileNotFoundError:
        return
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        yield Unread(_title(client), path, _line(error))
        return
    named: list[ClientServer] = []
    with Isolation() as reading:
        named += client.settings.servers(content if isinstance(content, Mapping) else {})
    if reading.fault is not None:
        yield Unread(_title(client), path, _line(reading.fault.summary))
    for server in named:
        yield Target(_title(client), str(path), server.url, server.context)


def _line(told: object) -> str:
    return " ".join(str(told).split())[:200]


def _parsed(path: Path) -> Any:
    text = read_bounded(path, LARGEST).decode()
    if path.suffix == ".toml":
        return tomllib.loads(text)
    return yaml.safe_load(text) if path.suffix in (".yaml", ".yml") else json.loads(text)


def configured(subject: Subject) -> Iterator[Finding]:
    found = list(targets(subject.registry.clients.values(), subject.environ, subject.home))
    for each in found:
        if isinstance(each, Unread):
            summary = f"{each.client}: {each.path} cannot be read: {each.why}"
            yield Finding("clients.file", "note", summary)
        else:
            yield from _judged(each, subject)
    if not found:
        yield Finding("clients.found", "ok", "no client's settings name a server of its own")


def keys(subject: Subject) -> Iterator[Finding]:
    names = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
    if all(subject.environ.get(name) for name in names):
        summary = f"{names[0]} and {names[1]} are both set: Claude Code sends one of them alone"
        yield Finding("clients.keys", "warn", summary, "unset the one that is not the proxy's key")


def web_proxies(subject: Subject) -> Iterator[Finding]:
    """A web proxy that would get requests to this machine's own addresses."""
    environ = subject.environ
    given = [name for name in PROXIES if environ.get(name)]
    exempt = f"{environ.get('NO_PROXY', '')},{environ.get('no_proxy', '')}"
    if given and not any(name in exempt for name in ("*", "127.0.0.1", "localhost")):
        summary = (
            f"{', '.join(given)} is set without NO_PROXY for this machine: clients may ask the "
        )
        summary += "web proxy for 127.0.0.1"
        remedy = "export NO_PROXY=127.0.0.1,localhost"
        yield Finding("clients.web_proxy", "warn", summary, remedy)


def _judged(target: Target, subject: Subject) -> Iterator[Finding]:
    summary = f"{target.client} asks {_shown(target.url)} ({target.source})"
    try:
        host, port = _address(target.url)
    except ValueError:
        remedy = "write it as http://host:port"
        yield Finding("clients.address", "warn", f"{summary}, which is no address", remedy)
        return
    if not is_loopback(host):
        yield Finding("clients.elsewhere", "note", f"{summary}: not this machine")
        return
    if _listens(host, port):
        yield Finding("clients.address", "ok", f"{summary}, where somebody listens")
    else:
        yield Finding("clients.address", "warn", f"{summary}, where nobody listens", LAUNCH)
    yield from _context(target, subject)


def _context(target: Target, subject: Subject) -> Iterator[Finding]:
    if target.context is None:
        return
    own = named_context(text_fields(subject.config)) if subject.config else None
    summary = f"{target.client} takes the context to be {target.context:,} tokens ({target.source})"
    if own is not None and target.context > own:
        remedy = f"set it to {own:,}, or what of that fits, so that the client compacts in time"
        summary += f", and {subject.model} has {own:,}"
        yield Finding("clients.context", "warn", summary, remedy)
    elif target.context < AGENT:
        remedy = f"set it to what the model holds: {AGENT:,} or more"
        summary += ": its own instructions take most of that"
        yield Finding("clients.context", "warn", summary, remedy)


def _address(url: str) -> tuple[str, int]:
    """Raises `ValueError`."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(url)
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def _shown(url: str) -> str:
    """Without the password."""
    before, at, behind = url.rpartition("@")
    return f"{before.partition('://')[0]}://{behind}" if at else url


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), REACH).close()
    except OSError:
        return False
    return True
