"""Requests as agents send them, through the proxy: what the engine gets and the client sees."""

import json
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[1] / "data" / "requests"


def sent(name: str, model: str, **changed: Any) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Path, body and headers of a stored request."""
    (path,) = DATA.glob(f"{name}_*.json")
    stored = json.loads(path.read_text())
    return stored["endpoint"], {**stored["body"], "model": model, **changed}, stored["headers"]


def post(raw: Any, request: tuple[str, dict[str, Any], dict[str, str]]) -> Any:
    path, body, headers = request
    return raw.post(path, json=body, headers=headers, timeout=300)


def streamed(raw: Any, request: tuple[str, dict[str, Any], dict[str, str]]) -> list[dict[str, Any]]:
    """The chunks of a stream that ends as it should."""
    lines = post(raw, request).raise_for_status().text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(line) for line in data]


def text_of(content: Any) -> str:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    return "\n".join(part["text"] for part in parts if part["type"] == "text")


def arrived(engine: Any, role: str) -> str:
    """All text of one role that reached the engine."""
    messages = engine.request["messages"]
    return "\n".join(text_of(m.get("content")) for m in messages if m["role"] == role)


def test_01_many_system_messages_reach_the_engine_with_their_roles(engine: Any, raw: Any) -> None:
    request = sent("01", "scripted")
    chunks = streamed(raw, request)
    assert chunks[-1]["usage"]["prompt_tokens"] == 7
    messages = request[1]["messages"]
    assert [m["role"] for m in engine.request["messages"]] == [m["role"] for m in messages]
    for message in messages:
        assert text_of(message["content"]) in arrived(engine, message["role"])
    assert engine.request["tools"] == request[1]["tools"]
    assert engine.request["max_tokens"] == 8192


def test_02_codex_tool_results_are_answered_in_order(engine: Any, raw: Any) -> None:
    reply = post(raw, sent("02", "scripted"))
    assert reply.status_code == 200, reply.text
    assert "response.completed" in reply.text
    heads = arrived(engine, "developer") + arrived(engine, "system")
    assert "You are Codex" in heads
    assert "skills_instructions" in heads
    results = [m["tool_call_id"] for m in engine.request["messages"] if m["role"] == "tool"]
    calls = [call["id"] for m in engine.request["messages"] for call in m.get("tool_calls") or []]
    assert results == calls
    assert len(results) == 2


def test_03_a_claude_code_request_is_answered(engine: Any, raw: Any) -> None:
    reply = post(raw, sent("03", "scripted"))
    assert reply.status_code == 200, reply.text
    assert "message_stop" in reply.text
    assert "You are Claude Code." in arrived(engine, "system")
    assert engine.request["max_tokens"] == 32000


def test_04_tool_results_reach_the_engine_in_order(engine: Any, raw: Any) -> None:
    request = sent("04", "scripted")
    assert post(raw, request).status_code == 200
    tools = [m for m in request[1]["messages"] if m["role"] == "tool"]
    got = [m for m in engine.request["messages"] if m["role"] == "tool"]
    assert [m["tool_call_id"] for m in got] == [m["tool_call_id"] for m in tools]
    assert [text_of(m["content"]) for m in got] == [text_of(m["content"]) for m in tools]


def test_09_every_parameter_reaches_the_engine(engine: Any, raw: Any) -> None:
    request = sent("09", "scripted")
    post(raw, request).raise_for_status()
    seen, body = engine.request, request[1]
    for name in (
        "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed"
    ).split():
        assert seen["sampling"][name] == body[name], name
    assert seen["sampling"]["logit_bias"] in ({"5": -100.0}, {5: -100.0})
    assert (seen["stop"], seen["max_tokens"], seen["n"]) == (body["stop"], 64, 1)
    assert (seen["tool_choice"], seen["parallel_tool_calls"]) == ("required", False)
    assert (seen["logprobs"], seen["top_logprobs"]) == (True, 3)
    assert seen["template"]["enable_thinking"] is False
    assert seen["template"]["preserve_thinking"] is True


PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEklEQVR4nGP4z8CAFWEXHbQSACj/P8Fu7N9hAAAAAElF"
    "TkSuQmCC"
)
HALF = PNG[: len(PNG) // 2 // 4 * 4]
GO_ON = {"role": "user", "content": "go on without it"}
BAD_IMAGES = {
    "/v1/chat/completions": [
        {"role": "user", "content": "look"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
            ],
        },
        {
            "role": "tool",
            "tool_call_id": "c",
            "content": [
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{HALF}"}}
            ],
        },
        GO_ON,
    ],
    "/v1/messages": [
        {"role": "user", "content": "look"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c", "name": "read", "input": {}}],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "content": [
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": HALF},
                        },
                        {"type": "document", "source": {"type": "text", "data": "salt"}},
                    ],
                }
            ],
        },
        GO_ON,
    ],
    "/v1/responses": [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_image", "image_url": f"data:image/png;base64,{HALF}"}],
        },
        {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "pepper"}},
        GO_ON,
    ],
}


@pytest.mark.parametrize("path", BAD_IMAGES)
def test_a_damaged_image_does_not_end_a_session(raw: Any, own_engine: Any, path: str) -> None:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    turns = {"input" if path == "/v1/responses" else "messages": BAD_IMAGES[path]}
    reply = raw.post(path, json={"model": "demo", limit: 16, **turns}, timeout=300)
    assert reply.status_code == 200, reply.text
    warnings = reply.headers["llm_provider-x-mlx-warnings"]
    assert "the image is malformed or truncated" in warnings
    if path != "/v1/chat/completions":
        assert f"{'document' if path == '/v1/messages' else 'web_search_call'}" in warnings
    if path == "/v1/messages":
        counted = raw.post(f"{path}/count_tokens", json={"model": "demo", **turns}, timeout=300)
        usage = reply.json()["usage"]
        used = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
        assert counted.json()["input_tokens"] == used
