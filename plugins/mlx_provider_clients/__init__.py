"""Coding agents for `mlx-provider launch`. `clients.toml` describes each; this module fills in the
values of a gateway (`_values`) and makes the agent's `Profile`."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mlx_provider import Client, Gateway, Profile, hookimpl

mlx_provider_api = 1

TABLES = Path(__file__).with_name("clients.toml")
FIELDS = ("environment", "files", "arguments", "hidden")  # of a `Profile`; the last are variables
PLACEHOLDER = re.compile(r"\{(\w+)\}")
REPLY_MS = 3_600_000  # limit for the first token; 100,000 prompt tokens can take as long
LEAST_WINDOW_TOKENS = 100_000
"""Claude Code raises a smaller `CLAUDE_CODE_AUTO_COMPACT_WINDOW` to this: it is then not set."""
PI_RECENT_TOKENS = 20_000  # tokens that a compaction of pi keeps by default


@hookimpl
def mlx_clients() -> Iterator[Client]:
    """One client for each table; entries that are not in `FIELDS` are fields of `Client`."""
    tables = tomllib.loads(TABLES.read_text(encoding="utf-8"))
    shared = tables.pop("shared")
    for name, table in tables.items():
        fields = {part: table.pop(part) for part in FIELDS if part in table}
        subagent = table.pop("subagent", None)  # a table for the client with its own main model
        yield Client(
            name,
            profile=partial(_profile, fields, shared),
            subagent=partial(_profile, subagent, shared) if subagent else None,
            aliases=tuple(table.pop("aliases", ())),
            **table,
        )


def _profile(table: Mapping[str, Any], shared: Mapping[str, Any], gateway: Gateway) -> Profile:
    """Fill the `FIELDS` of a table. `shared`: values of several clients."""
    known = _values(gateway)
    known |= {f"subagent_{name}": text for name, text in shared["subagent"].items()}
    for name, part in shared.items():  # a part may use the parts above it
        known[name] = _fill(part, known)
    environment, files, arguments, hidden = (_fill(table.get(part, {}), known) for part in FIELDS)
    return Profile(
        {name: _to_text(value) for name, value in environment.items()},
        {name: _file_content(name, value) for name, value in files.items()},
        tuple(map(_to_text, arguments)),
        tuple(hidden),
    )


def _values(gateway: Gateway) -> dict[str, Any]:
    """What `{name}` stands for. An entry whose value is `None` is left out of its table."""
    images = ["image"] if gateway.images else []
    fits_window = gateway.context >= LEAST_WINDOW_TOKENS
    home, xdg = Path.home() / ".gitconfig", Path.home() / ".config" / "git" / "config"
    return {
        "url": gateway.url, "key": gateway.key, "model": gateway.model,
        "context": gateway.context, "output": gateway.output,
        "prompt": gateway.context - gateway.output,
        "images": gateway.images, "inputs": ["text", *images],
        "folder": str(gateway.folder), "reply_ms": REPLY_MS,
        "claude_window": gateway.context if fits_window else None,
        "continue_capabilities": ["tool_use", *(["image_input"] if images else [])],
        "pi_recent": min(PI_RECENT_TOKENS, gateway.context // 4),
        # the file that git reads for a user, one of two
        "git_config": str(xdg if xdg.is_file() and not home.is_file() else home),
    }  # fmt: skip


def _fill(value: Any, known: Mapping[str, Any]) -> Any:
    """Replace each known `{name}`, also in keys. A text that is only `{name}` becomes its value."""
    if isinstance(value, Mapping):
        filled = {_fill(name, known): _fill(inner, known) for name, inner in value.items()}
        return {name: inner for name, inner in filled.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_fill(inner, known) for inner in value]
    if not isinstance(value, str):
        return value
    whole = PLACEHOLDER.fullmatch(value)
    if whole and whole[1] in known:
        return known[whole[1]]
    return PLACEHOLDER.sub(lambda found: str(known.get(found[1], found[0])), value)


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _file_content(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if name.endswith(".toml"):
        return "\n".join(_toml_lines(value)) + "\n"
    return json.dumps(value, indent=2)


def _toml_lines(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[str]:
    """A table in TOML. Texts, numbers and booleans are written as in JSON, except that TOML has no
    surrogates and no U+007F."""
    tables = {name: value for name, value in table.items() if isinstance(value, dict)}
    lines = [
        f"{name} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", r"\u007f")
        for name, value in table.items()
        if name not in tables
    ]
    for name, inner in tables.items():
        lines += [f"[{'.'.join((*path, name))}]", *_toml_lines(inner, (*path, name))]
    return lines
