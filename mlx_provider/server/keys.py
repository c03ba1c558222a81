"""The keys of a server on TCP: one of its operator, and named keys for others."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from ..errors import BadRequest
from ..safe_open import read_trusted

LARGEST_FILE = 2**16
SHORTEST = 16
"""Characters of a named key. A shorter second word is rather the second word of a phrase."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
FOUND = "mlx_provider.key"
"""The item of a request's scope with its key."""
CONNECTION = "mlx_provider.connection"
"""The item of the scope's `state` with its connection."""


@dataclass(frozen=True)
class Key:
    """Does not appear in its `repr`."""

    text: str = field(repr=False)
    name: str | None = None
    """Tenant of its requests. `None`: the operator's key, without limits."""

    def marks(self, tenant: str | None) -> dict[str, Any]:
        """Fields of a request that this key decides. `tenant`: as the request names it; a gateway
        with a named key keeps its tenants separate, but they share one account."""
        if self.name is None:
            return {"origin": "remote"}
        own = f"key {self.name}:"
        return {"origin": "named", "tenant": own + (tenant or ""), "account": own, "share": 1.0}


class Keys:
    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = {_digest(key.text.encode("utf-8", "surrogateescape")): key for key in keys}

    def sent(self, headers: Headers) -> Key | None:
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        given = (bearer if kind == "Bearer" else "", headers.get("x-api-key", ""))
        digests = [_digest(each.encode("latin-1")) for each in given]
        return next((self._keys[each] for each in digests if each in self._keys), None)


def key_of(scope: Scope) -> Key:
    """Only behind a gate with keys."""
    key: Key = scope[FOUND]
    return key


def owner_of(scope: Scope) -> str:
    """Owner of connection, body and reply: the name of a key, "" for the operator."""
    return (key_of(scope).name or "") if FOUND in scope else ""


def is_named(scope: Scope) -> bool:
    return FOUND in scope and key_of(scope).name is not None


def read_keys(file: Path) -> tuple[Key, ...]:
    """Each line is `KEY`, at most once, or `NAME KEY`.

    Raises `BadRequest` for a file that others can read or of another form: it names the line
    without its text, which could be a key."""
    try:
        text = read_trusted(file, LARGEST_FILE, closed_to=0o077).decode("ascii", "replace")
    except OSError as error:
        raise BadRequest(f"key file {file}: {error.strerror}", param="api_key_file") from None
    found: dict[int, Key] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                found[number] = _unlike(found, _key(line.strip()))
            except ValueError as error:
                where = f"key file {file}, line {number}: {error}"
                raise BadRequest(where, param="api_key_file") from None
    if not found:
        remedy = "write a line KEY, or lines NAME KEY"
        raise BadRequest(f"key file {file} holds no key: {remedy}", param="api_key_file")
    return tuple(found.values())


def read_key(file: Path) -> str:
    """Raises `BadRequest` as `read_keys`, and for several keys."""
    first, *others = read_keys(file)
    if others:
        remedy = "name a file that holds one of them"
        raise BadRequest(f"key file {file} holds several keys: {remedy}", param="api_key_file")
    return first.text


def _key(line: str) -> Key:
    """Raises `ValueError` with the fault and the remedy."""
    words = line.split()
    if not line.isascii() or not line.replace("\t", " ").isprintable():
        raise ValueError("a character is not printable ASCII: write KEY or NAME KEY")
    if len(words) > 2:
        raise ValueError("more than two words: write KEY or NAME KEY")
    if len(words) == 1:
        return Key(words[0])
    name, text = words
    if not NAME.fullmatch(name):
        raise ValueError("the name before the key must be 1 to 64 letters, digits, '.', '_' or '-'")
    if len(text) < SHORTEST:
        raise ValueError(f"the key after the name needs at least {SHORTEST} characters")
    return Key(text, name)


def _unlike(found: dict[int, Key], key: Key) -> Key:
    """Raises `ValueError` if an earlier line has the same key."""
    for number, other in found.items():
        if other.text == key.text:
            raise ValueError(f"the key is that of line {number}: give each line its own")
        if other.name == key.name:
            what = (
                "line {} has no name either" if key.name is None else "the name is that of line {}"
            )
            raise ValueError(what.format(number) + ": give each key its own name (NAME KEY)")
    return key


def _digest(text: bytes) -> bytes:
    # the time to find a digest reveals nothing about the keys
    return hashlib.sha256(text).digest()
