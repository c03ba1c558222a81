"""Blocks and items that only another server can use, as text for a model. Agents resend them in
every turn of a conversation that began with a cloud model."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Iterator, Mapping
from typing import Any

LONGEST = 20_000
DEEPEST = 12
IMAGES = ("image", "input_image", "image_url", "computer_screenshot")
READABLE = (
    "name", "tool_name", "server_label", "query", "queries", "input", "arguments", "action",
    "operation", "command", "code", "title", "filename", "context", "url", "source", "file",
    "text", "data", "file_data", "stdout", "stderr", "logs", "content", "output", "outputs",
    "result", "results", "error", "error_code", "return_code", "tools", "tool_references",
)  # fmt: skip
JSON = ("input", "arguments", "action", "operation")
_TEXT_DATA = re.compile(r"data:(?:text/|application/(?:json|xml))[^,]*?(;base64)?,")


def foreign_text(block: Mapping[str, Any]) -> str:
    kind = str(block.get("type") or "block")[:100]
    if kind in IMAGES:
        return "[image: not available, not shown]"
    lines = list(dict.fromkeys(line for line in _lines(block, DEEPEST) if line.strip()))
    if not lines:
        return f"[{kind}: not shown, this model cannot take it]"
    text = "\n".join([f"[{kind}]", *lines])
    return text if len(text) <= LONGEST else text[:LONGEST] + "\n[cut]"


def _lines(value: Any, deeper: int) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) and deeper:
        for item in value:
            yield from _lines(item, deeper - 1)
    elif isinstance(value, Mapping) and deeper:
        if value.get("type") in IMAGES:
            yield "[image: not shown]"
            return
        for name in READABLE:
            if value.get(name) is not None:
                yield from _field(value, name, deeper - 1)


def _field(value: Mapping[str, Any], name: str, deeper: int) -> Iterator[str]:
    found = value[name]
    if name in JSON and not isinstance(found, str):
        yield json.dumps(found, ensure_ascii=False)
    elif name in ("data", "file_data"):
        yield from _data(value, found)
    elif name == "result" and value.get("type") == "image_generation_call":
        yield "[image: not shown]"
    elif isinstance(found, int) and not isinstance(found, bool):
        yield f"{name}: {found}"
    else:
        yield from _lines(found, deeper)


def _data(value: Mapping[str, Any], found: Any) -> Iterator[str]:
    if not isinstance(found, str):
        return
    text = _TEXT_DATA.match(found)
    if text is not None:
        body = found[text.end() :]
        try:
            yield b64decode(body).decode() if text[1] else body
        except ValueError:
            yield "[damaged, not shown]"
    elif value.get("type") == "text" or str(value.get("media_type")).startswith("text/"):
        yield found
