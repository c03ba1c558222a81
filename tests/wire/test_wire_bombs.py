"""One bomb of each kind on each route that generates. Bodies with too many values: see access."""

import base64
import re
import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from tiny_pictures import chunk

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def huge_png() -> str:
    """A small file that says it has 900 million pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 8, 0, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes(2**20)))
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + head + pixels + chunk(b"IEND", b"")).decode()


def image(path: str) -> dict[str, Any]:
    data = huge_png()
    if path == MESSAGES:
        source = {"type": "base64", "media_type": "image/png", "data": data}
        part: dict[str, Any] = {"type": "image", "source": source}
    elif path == RESPONSES:
        part = {"type": "input_image", "image_url": f"data:image/png;base64,{data}"}
    else:
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    return said(path, [part])


def schema(path: str) -> dict[str, Any]:
    bomb = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}
    if path == MESSAGES:
        form: dict[str, Any] = {
            "output_config": {"format": {"type": "json_schema", "schema": bomb}}
        }
    elif path == RESPONSES:
        form = {"text": {"format": {"type": "json_schema", "name": "n", "schema": bomb}}}
    else:
        given = {"name": "n", "schema": bomb}
        form = {"response_format": {"type": "json_schema", "json_schema": given}}
    return {**said(path, "x"), **form}


def tool(path: str) -> dict[str, Any]:
    bomb = {"type": "string", "pattern": "^((a{999}){999}){999}$"}
    parameters = {"type": "object", "properties": {"a": bomb}, "required": ["a"]}
    if path == MESSAGES:
        given: dict[str, Any] = {"name": "f", "input_schema": parameters, "strict": True}
        choice: Any = {"type": "any"}
    else:
        function = {"name": "f", "parameters": parameters, "strict": True}
        given = {"type": "function"}
        given |= function if path == RESPONSES else {"function": function}
        choice = "required"
    return {**said(path, "x"), "tools": [given], "tool_choice": choice}


def said(path: str, content: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"max_output_tokens" if path == RESPONSES else "max_tokens": 1}
    body["input" if path == RESPONSES else "messages"] = [{"role": "user", "content": content}]
    return body


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize(
    ("bomb", "model", "told"),
    [
        pytest.param(image, "demo", "pixels", marks=pytest.mark.sweep),  # loads a model that sees
        (schema, "", "items; max is 2000"),
        (tool, "", "too many expressions|takes more than"),
    ],
)
def test_each_kind_of_bomb_is_refused_on_each_route(
    engine: Any, bomb: Callable[[str], dict[str, Any]], model: str, told: str, path: str
) -> None:
    answer = engine.alice.post(path, json={**bomb(path), "model": model or engine.scripted})
    assert answer.status_code == 400, answer.text[:300]
    message = answer.json()["error"]["message"]
    assert re.search(told, message)
    assert len(message) < 1000
