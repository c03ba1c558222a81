"""Conversations with parts that only another server reads, and with results out of order."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CASES = json.loads((Path(__file__).parents[1] / "data" / "foreign_blocks.json").read_text())


def said(text: str, *roles: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role in roles or ("user",)]


def histories(path: str, case: dict[str, Any]) -> Iterator[tuple[list[Any], str]]:
    """Conversations with the parts of a case in an earlier turn, and the place of the first."""
    items = case.get("items") or [case["item"]] if "part" not in case else []
    if items:
        yield [*said("hi"), *items, *said("ok", "assistant", "user")], "input[1]"
        yield [*said("hi"), *items], "input[1]"
        return
    part = case["part"]
    if path == "/v1/messages":
        use = {"type": "tool_use", "id": "t", "name": "read", "input": {}}
        calls = {"role": "assistant", "content": [use]}
        result = {"type": "tool_result", "tool_use_id": "t", "content": [part]}
        at = "messages[2].content[0].content[0]"
    elif path == "/v1/responses":
        calls = {"type": "function_call", "call_id": "t", "name": "read", "arguments": "{}"}
        yield (
            [
                *said("hi"),
                calls,
                {"type": "function_call_output", "call_id": "t", "output": [part]},
            ],
            "input[2].output[0]",
        )
        yield (
            [{"role": "user", "content": [part]}, *said("ok", "assistant", "user")],
            "input[0].content[0]",
        )
        return
    else:
        call = {"id": "t", "type": "function", "function": {"name": "read", "arguments": "{}"}}
        calls = {"role": "assistant", "content": None, "tool_calls": [call]}
        yield (
            [*said("hi"), calls, {"role": "tool", "tool_call_id": "t", "content": [part]}],
            "messages[2].content[0]",
        )
        yield (
            [{"role": "user", "content": [part]}, *said("ok", "assistant", "user")],
            "messages[0].content[0]",
        )
        return
    yield [*said("hi"), calls, {"role": "user", "content": [result]}], at
    yield (
        [*said("hi"), calls, {"role": "user", "content": [{**result, "content": "x"}, part]}],
        "messages[2].content[1]",
    )
    for role in ("user", "assistant"):
        yield (
            [*said("hi"), {"role": role, "content": [part]}, *said("ok", "user")],
            "messages[1].content[0]",
        )


EACH = [(path, case) for path, cases in CASES.items() for case in cases]
NAMES = [f"{path}-{(c.get('part') or c.get('item') or c['items'][0])['type']}" for path, c in EACH]


TWO = [("a", "Ulm"), ("b", "Bonn")]
PARALLEL: dict[str, list[Any]] = {
    "/v1/chat/completions": [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": i,
                    "type": "function",
                    "function": {"name": "weather", "arguments": f'{{"city": "{c}"}}'},
                }
                for i, c in TWO
            ],
        },
        *({"role": "tool", "tool_call_id": i, "content": f"sun in {c}"} for i, c in reversed(TWO)),
    ],
    "/v1/messages": [
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": i, "name": "weather", "input": {"city": c}}
                for i, c in TWO
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": i, "content": f"sun in {c}"}
                for i, c in reversed(TWO)
            ],
        },
    ],
    "/v1/responses": [
        *(
            {
                "type": "function_call",
                "call_id": i,
                "name": "weather",
                "arguments": f'{{"city": "{c}"}}',
            }
            for i, c in TWO
        ),
        *(
            {"type": "function_call_output", "call_id": i, "output": f"sun in {c}"}
            for i, c in reversed(TWO)
        ),
    ],
}
