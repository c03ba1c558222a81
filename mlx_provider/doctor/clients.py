"""Clients on this machine that are set to a server: whether it runs, and suits them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

from ..client.address import is_loopback
from ..families.checkpoint import named_context
from ..families.estimate import text_fields
from .checkpoint import AGENT
from .client_files import Target, Unread, targets
from .findings import Finding
from .subject import Subject

REACH = 0.5
"""Seconds in which a port of this machine answers."""
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
LAUNCH = "start the proxy there, or begin the client with an address that is served"


def configured(subject: Subject) -> Iterator[Finding]:
    """The servers that clients are set to."""
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
    """Keys that hide others."""
    names = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
    if all(subject.environ.get(name) for name in names):
        summary = f"{names[0]} and {names[1]} are both set: Claude Code sends one of them alone"
        yield Finding("clients.keys", "warn", summary, "unset the one that is not the proxy's key")


def web_proxies(subject: Subject) -> Iterator[Finding]:
    """A web proxy that would be asked for this machine's own addresses."""
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
    """The address without its password."""
    before, at, behind = url.rpartition("@")
    return f"{before.partition('://')[0]}://{behind}" if at else url


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), REACH).close()
    except OSError:
        return False
    return True
