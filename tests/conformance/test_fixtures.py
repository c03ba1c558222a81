"""What authors get of pytest by having this package installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_provider.testing.scripted import Call, Step, script

ASKED = script(Step("Looking.", (Call("bash", {"command": "ls"}),)))
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


@pytest.mark.conformance
def test_an_engine_says_what_it_is_told(
    mlx_engine: Any, mlx_scripted_folder: Callable[..., Path]
) -> None:
    folder = mlx_scripted_folder("json", merges=2000)
    status, events = mlx_engine.ask(ASKED, model=str(folder), tools=[BASH], max_tokens=200)
    assert status == 200
    text = "".join(event.get("content", "") for event in events)
    calls = [call for event in events for call in event.get("tool_calls", [])]
    assert text.strip() == "Looking."
    assert [call["name"] for call in calls if call.get("name")] == ["bash"]


@pytest.mark.conformance
def test_a_proxy_before_it(
    mlx_proxy: Callable[..., Any], mlx_scripted_folder: Callable[..., Path]
) -> None:
    proxy = mlx_proxy(mlx_scripted_folder("json", merges=2000))
    reply = httpx.post(
        f"{proxy.url}/v1/chat/completions",
        headers={"Authorization": f"Bearer {proxy.key}"},
        json={
            "model": "model",
            "messages": [{"role": "user", "content": ASKED}],
            "tools": [BASH],
            "max_tokens": 200,
        },
        timeout=300,
        trust_env=False,
    )
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "bash"
