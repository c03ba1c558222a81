"""Recorded sessions of coding agents: what each sends first, its tools, calls and results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_provider.wire.anthropic.request import chat_messages
from mlx_provider.wire.responses.conversation import messages_of

RECORDED = Path(__file__).parents[1] / "data" / "requests"
SYSTEM = 3000
"""Characters of the system text, so that a CPU can prefill it."""


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Session:
    system: str
    asked: str
    tools: list[dict[str, Any]]
    calls: Sequence[Call]
    results: Sequence[str]
    """Of the calls."""


def sessions() -> dict[str, Session]:
    """By client. The longest one has calls and results for all: where a client lacks the tool, a
    command of its shell reads the file."""
    chat = _body("08b_chat_long_history_turn_n_plus_1")
    made = [call["function"] for m in chat["messages"] for call in m.get("tool_calls") or ()]
    calls = [Call(each["name"], json.loads(each["arguments"])) for each in made]
    results = [m["content"] for m in chat["messages"] if m["role"] == "tool"]
    functions = [each["function"] for each in chat["tools"]]
    message = _body("03_messages_claude_code")
    claude, _ = chat_messages(message["system"], message["messages"])
    response = _body("02_responses_codex_developer")
    codex, _ = messages_of(response["input"], None)
    return {
        "OpenCode": _session(
            chat["messages"], [_tool(f, f["parameters"]) for f in functions], calls, results
        ),
        "Claude Code": _session(
            claude,
            [_tool(t, t["input_schema"]) for t in message["tools"] if t.get("input_schema")],
            [Call("Bash", {"command": _command(call)}) for call in calls],
            results,
        ),
        "Codex": _session(
            codex,
            [_tool(t, t["parameters"]) for t in response["tools"] if t["type"] == "function"],
            [Call("exec_command", {"cmd": _command(call)}) for call in calls],
            results,
        ),
    }


def _body(name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())["body"]
    return body


def _tool(named: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": named["name"], "parameters": parameters}}


def _command(call: Call) -> str:
    found: str = call.arguments.get("command") or f"cat {call.arguments['filePath']}"
    return found


def _session(
    messages: Any, tools: list[dict[str, Any]], calls: Sequence[Call], results: Sequence[str]
) -> Session:
    system, asked = (
        _text(next(m["content"] for m in messages if m["role"] in roles))
        for roles in (("system", "developer"), ("user",))
    )
    return Session(system[:SYSTEM], asked, tools, calls, results)


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(p.get("text", "") for p in content)
