"""Which server each known client would ask, by its variables and files; they are only read.

A client is a record here, as others are that start clients: its variables, its files, and where in
them an address stands.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..plain_file import read_bounded

LARGEST = 2**22
"""Bytes of a client's file."""


@dataclass(frozen=True)
class Target:
    """One server that a client would ask."""

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


Read = Callable[[Mapping[str, Any]], Iterator[tuple[str, int | None]]]
"""The content of a file -> (address, context)."""


@dataclass(frozen=True)
class Client:
    """A program that talks to a proxy."""

    name: str
    variables: tuple[str, ...] = ()
    """Each an address."""
    files: tuple[str, ...] = ()
    """Below the home folder; `$NAME/...` below a folder that a variable names instead."""
    read: Read = lambda content: iter(())


def _claude(content: Mapping[str, Any]) -> Iterator[tuple[str, int | None]]:
    variables = _mapping(content, "env")
    window = str(variables.get("CLAUDE_CODE_AUTO_COMPACT_WINDOW", ""))
    if url := variables.get("ANTHROPIC_BASE_URL"):
        yield str(url), int(window) if window.isdigit() else None


def _codex(content: Mapping[str, Any]) -> Iterator[tuple[str, int | None]]:
    chosen = _mapping(content, "model_providers", str(content.get("model_provider")))
    if url := chosen.get("base_url"):
        yield str(url), _count(content.get("model_context_window"))


def _opencode(content: Mapping[str, Any]) -> Iterator[tuple[str, int | None]]:
    for provider in _each(content.get("provider")):
        if url := _mapping(provider, "options").get("baseURL"):
            limits = [_mapping(model, "limit") for model in _each(provider.get("models"))]
            yield str(url), _least(limit.get("context") for limit in limits)


def _qwen(content: Mapping[str, Any]) -> Iterator[tuple[str, int | None]]:
    named = _mapping(content, "security", "auth").get("baseUrl")
    if url := named or _mapping(content, "env").get("OPENAI_BASE_URL"):
        window = _mapping(content, "model", "generationConfig").get("contextWindowSize")
        yield str(url), _count(window)


def _pi(content: Mapping[str, Any]) -> Iterator[tuple[str, int | None]]:
    for provider in _each(content.get("providers")):
        if url := provider.get("baseUrl"):
            windows = (model.get("contextWindow") for model in _each(provider.get("models")))
            yield str(url), _least(windows)


def _continue(content: Mapping[str, Any]) -> Iterator[tuple[str, int | None]]:
    for model in _each(content.get("models")):
        if url := model.get("apiBase"):
            options = _mapping(model, "defaultCompletionOptions")
            yield str(url), _count(options.get("contextLength") or model.get("contextLength"))


def _aider(content: Mapping[str, Any]) -> Iterator[tuple[str, int | None]]:
    if url := content.get("openai-api-base"):
        yield str(url), None


CLIENTS = (
    Client(
        "Claude Code",
        ("ANTHROPIC_BASE_URL",),
        ("$CLAUDE_CONFIG_DIR/settings.json", ".claude/settings.json"),
        _claude,
    ),
    Client("clients of OpenAI's API", ("OPENAI_BASE_URL", "OPENAI_API_BASE")),
    Client("Codex", (), ("$CODEX_HOME/config.toml", ".codex/config.toml"), _codex),
    Client(
        "OpenCode",
        (),
        (
            "$XDG_CONFIG_HOME/opencode/opencode.json",
            ".config/opencode/opencode.json",
        ),
        _opencode,
    ),
    Client("Qwen Code", (), (".qwen/settings.json",), _qwen),
    Client("pi", (), (".pi/agent/models.json",), _pi),
    Client("Continue", (), (".continue/config.yaml",), _continue),
    Client("aider", (), (".aider.conf.yml",), _aider),
)


def targets(environ: Mapping[str, str], home: Path) -> Iterator[Target | Unread]:
    """All that the known clients would ask, and the files that could not be read."""
    for client in CLIENTS:
        for name in client.variables:
            if url := environ.get(name):
                yield Target(client.name, name, url, _window(client, environ))
        for path in _paths(client, environ, home):
            yield from _read(client, path)


def _window(client: Client, environ: Mapping[str, str]) -> int | None:
    told = environ.get("CLAUDE_CODE_AUTO_COMPACT_WINDOW", "")
    return int(told) if client.read is _claude and told.isdigit() else None


def _paths(client: Client, environ: Mapping[str, str], home: Path) -> Iterator[Path]:
    for file in client.files:
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
    except (OSError, ValueError, yaml.YAMLError) as error:
        yield Unread(client.name, path, " ".join(str(error).split())[:200])
        return
    if isinstance(content, Mapping):
        for url, context in client.read(content):
            yield Target(client.name, str(path), url, context)


def _parsed(path: Path) -> Any:
    text = read_bounded(path, LARGEST).decode()
    if path.suffix == ".toml":
        return tomllib.loads(text)
    return yaml.safe_load(text) if path.suffix in (".yaml", ".yml") else json.loads(text)


def _mapping(content: Any, *names: str) -> Mapping[str, Any]:
    """What stands below some names, where that is a mapping; else an empty one."""
    for name in names:
        content = content.get(name) if isinstance(content, Mapping) else None
    return content if isinstance(content, Mapping) else {}


def _each(content: Any) -> list[Mapping[str, Any]]:
    """The mappings in a list, or in the values of a mapping."""
    found = content.values() if isinstance(content, Mapping) else content
    listed = found if isinstance(content, (list, Mapping)) else []
    return [each for each in listed if isinstance(each, Mapping)]


def _count(found: Any) -> int | None:
    return found if isinstance(found, int) and found > 0 else None


def _least(found: Iterator[Any]) -> int | None:
    return min((count for each in found if (count := _count(each))), default=None)
