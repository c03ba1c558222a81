"""Histories that began elsewhere: results out of order, parts that only another server reads."""

import json
from typing import Any

import openai
import pytest

from histories import EACH, NAMES, PARALLEL, histories, said
from mlx_provider.chat.messages.normalise import normalise
from mlx_provider.errors import BadRequest
from mlx_provider.protocol.requests import ModelOptions
from mlx_provider.wire import ROUTES

BODY: dict[str, Any] = {"model": "m", "max_tokens": 1}


def read(path: str, turns: list[Any]) -> tuple[str, list[str]]:
    """What reaches the template, and the warnings for the client."""
    name = "input" if path == "/v1/responses" else "messages"
    body = {**BODY, name: turns}
    if path == "/v1/responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    asked = ROUTES[path](body, {"model": "m", "options": ModelOptions()})
    (request,) = asked.requests
    done = normalise(request.messages, hoist_system=False)  # type: ignore[attr-defined]
    return json.dumps(done.messages, ensure_ascii=False), [*map(asked.names.text, done.warnings)]


@pytest.mark.parametrize(("path", "case"), EACH, ids=NAMES)
def test_parts_of_other_servers_become_text_in_earlier_turns(path: str, case: Any) -> None:
    for turns, place in histories(path, case):
        text, warnings = read(path, turns)
        assert [w for w in case["words"] if json.dumps(w)[1:-1] not in text] == []
        assert [w for w in case.get("hidden", ()) if w in text] == []
        if not case.get("quiet"):
            assert len(warnings) == 1
            assert warnings[0].startswith(place) or "items" in case
    if "part" in case:
        name = "input" if path == "/v1/responses" else "messages"
        with pytest.raises(BadRequest) as refused:
            read(
                path,
                [*said("hi", "user", "assistant"), {"role": "user", "content": [case["part"]]}],
            )
        assert refused.value.param.startswith(f"{name}[2].content[0]")


@pytest.mark.parametrize("path", PARALLEL)
def test_results_of_parallel_calls_follow_the_order_of_the_calls(path: str) -> None:
    turns = [*said("both?"), *PARALLEL[path]]
    text, warnings = read(path, turns)
    assert text.index("sun in Ulm") < text.index("sun in Bonn")
    assert warnings == []
    cut = (
        turns[:-1]
        if path != "/v1/messages"
        else [*turns[:-1], {**turns[-1], "content": turns[-1]["content"][:1]}]
    )
    text, warnings = read(path, [*cut, *said("go on")])
    assert text.index("no result") < text.index("sun in Bonn")
    place = {
        "/v1/chat/completions": "messages[1].tool_calls[0]",
        "/v1/messages": "messages[1].content[0]",
        "/v1/responses": "input[1]",
    }[path]
    assert [w.partition(" ")[0] for w in warnings] == [place]


def test_the_count_of_a_responses_prompt_equals_usage(client: openai.OpenAI, engine: Any) -> None:
    given: Any = {"model": engine.scripted, "input": [*said("hi"), *PARALLEL["/v1/responses"]]}
    counted = client.responses.input_tokens.count(**given, instructions="Be brief.")
    response = client.responses.create(**given, instructions="Be brief.", max_output_tokens=1)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == response.usage.input_tokens


def test_a_warning_header_names_the_part(engine: Any) -> None:
    pdf = {
        "type": "document",
        "source": {"type": "base64", "media_type": "application/pdf", "data": "JV"},
    }
    turns = [{"role": "user", "content": [pdf]}, *said("go on")]
    body = {"model": engine.scripted, "max_tokens": 1, "messages": turns}
    reply = engine.http.post("/v1/messages", json=body)
    assert reply.status_code == 200, reply.text
    assert "messages[0].content[0] is of type 'document'" in reply.headers["x-mlx-warnings"]
    counted = engine.http.post(
        "/v1/messages/count_tokens", json={k: v for k, v in body.items() if k != "max_tokens"}
    )
    assert counted.json()["input_tokens"] > 5
