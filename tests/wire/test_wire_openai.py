"""OpenAI's routes of an engine, read by OpenAI's SDK and compared with the LiteLLM handler."""

import gc
import json
from typing import Any

import litellm
import openai
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

import mlx_provider.litellm  # noqa: F401  (registers the handler)
from mlx_provider.testing.scripted import Call, Step, script

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
ALL = script(
    Step("Here it is.", (Call("look", {"at": "a"}), Call("look", {"at": "b"})), think="Hm.")
)
CASES: dict[str, dict[str, Any]] = {
    "thought, text and calls": {"messages": [{"role": "user", "content": ALL}], "tools": [TOOL]},
    "several choices": {
        "messages": [{"role": "user", "content": script(Step("one two three"))}],
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 4,
    },
    "stop": {
        "messages": [{"role": "user", "content": script(Step("one two three"))}],
        "stop": ["two"],
    },
    "schema": {
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": {"enum": [17]}},
        },
    },
    "schema in a JSON object": {
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {
            "type": "json_object",
            "schema": {
                "properties": {"a": {"enum": ["x"]}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
        "max_tokens": -1,
    },
    "stop in a thought": {
        "messages": [{"role": "user", "content": script(Step("Hello", think="The answer is"))}],
        "stop": ["answer"],
    },
    "stop before a call": {
        "messages": [{"role": "user", "content": ALL}],
        "tools": [TOOL],
        "stop": ["look", "Hm", "}"],
    },
}
SAID = {
    "schema in a JSON object": ("", '{"a":"x"}', "stop"),
    "stop in a thought": ("The answer is", "Hello", "stop"),
    "stop before a call": ("Hm.", "Here it is.", "tool_calls"),
}
"""Thought, content and reason of a reply."""


def events(text: str) -> list[str]:
    """The data of each event; every event has one line."""
    frames = [frame for frame in text.split("\n\n") if frame]
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [frame.removeprefix("data: ") for frame in frames]


def joined(chunks: list[ChatCompletionChunk]) -> list[dict[str, Any]]:
    """The choices of a stream."""
    choices: dict[int, dict[str, Any]] = {}
    for choice in (each for chunk in chunks for each in chunk.choices):
        said = choices.setdefault(choice.index, {"content": "", "thought": "", "calls": [], "n": 0})
        delta = choice.delta.model_dump(exclude_none=True)
        said["content"] += delta.get("content", "")
        said["thought"] += delta.get("reasoning_content", "")
        for piece in delta.get("tool_calls", []):
            function = piece["function"]
            if function.get("name"):
                said["calls"].append([function["name"], ""])
            said["calls"][-1][1] += function.get("arguments", "")
        if choice.logprobs is not None:
            said["n"] += len(choice.logprobs.content or [])
        said["reason"] = choice.finish_reason
    return [choices[index] for index in sorted(choices)]


def said_by(reply: Any) -> list[dict[str, Any]]:
    """The choices of a whole reply, of either door."""
    choices = []
    for choice in reply.choices:
        message = choice.message
        calls = [call.function for call in message.tool_calls or []]
        logprobs = getattr(choice, "logprobs", None)
        choices.append(
            {
                "content": message.content or "",
                "thought": getattr(message, "reasoning_content", None) or "",
                "calls": [[call.name, call.arguments] for call in calls],
                "n": len(logprobs.content) if logprobs else 0,
                "reason": choice.finish_reason,
            }
        )
    return choices


@pytest.mark.parametrize("case", CASES)
def test_a_reply_is_the_same_whole_streamed_and_by_litellm(engine: Any, case: str) -> None:
    asked = {"model": engine.scripted, "temperature": 0, **CASES[case]}
    path = "/v1/chat/completions"
    whole = engine.http.post(path, json=asked).raise_for_status()
    reply = ChatCompletion.model_validate_json(whole.text)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = engine.http.post(path, json=asked | options).raise_for_status()
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(streamed.text)
    assert last == "[DONE]"
    parts = [ChatCompletionChunk.model_validate_json(chunk) for chunk in chunks]
    assert said_by(reply) == joined(parts)
    if case in SAID:
        (said,) = said_by(reply)
        assert (said["thought"], said["content"].strip(), said["reason"]) == SAID[case]
    assert parts[-1].choices == []
    assert parts[-1].usage is not None
    assert all(part.usage is None for part in parts[:-1])
    assert len({(part.id, part.created, part.model) for part in parts}) == 1
    assert [c.delta.role for part in parts for c in part.choices].count("assistant") == len(
        reply.choices
    )

    handler = litellm.completion(
        **{**asked, "model": f"mlx/{engine.scripted}"}, api_base=engine.url, api_key="the-key"
    )
    assert said_by(handler) == said_by(reply)
    usage, other = whole.json()["usage"], handler.usage.model_dump()
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [usage[name] for name in names] == [other[name] for name in names]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0
    if "logprobs" in asked:
        ours = [c["logprobs"]["content"] for c in whole.json()["choices"]]
        assert ours == [c.logprobs.model_dump()["content"] for c in handler.choices]


def test_the_openai_sdk_accumulates_the_chat_stream(engine: Any, client: openai.OpenAI) -> None:
    messages: Any = CASES["thought, text and calls"]["messages"]
    tools: Any = [TOOL]
    with client.chat.completions.stream(
        model=engine.scripted, messages=messages, tools=tools
    ) as stream:
        reply = stream.get_final_completion()
    (choice,) = reply.choices
    assert choice.message.content == "Here it is."
    arguments = [json.loads(call.function.arguments) for call in choice.message.tool_calls or []]
    assert arguments == [{"at": "a"}, {"at": "b"}]
    assert choice.finish_reason == "tool_calls"


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_providers_get_equal_replies_whole_and_streamed(engine: Any, provider: str) -> None:
    place: Any = {"api_base": engine.url + "/v1", "api_key": "the-key"}
    place["model"] = f"{provider}/{engine.scripted}"
    asked = place | CASES["thought, text and calls"]
    whole = litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True))
    for reply in (whole, litellm.stream_chunk_builder(chunks)):
        message = reply.choices[0].message  # type: ignore[union-attr]
        calls = [call.function.arguments for call in message.tool_calls]
        assert (message.content, message.reasoning_content) == ("Here it is.", "Hm.")
        assert calls == ['{"at": "a"}', '{"at": "b"}']
    tools = [{"type": "function", **TOOL["function"]}]  # type: ignore[dict-item]
    asks = {**place, "input": asked["messages"], "tools": tools}
    *_, last = litellm.responses(**asks, stream=True)
    for reply in (litellm.responses(**asks), last.response):
        items = [item.type for item in reply.output]
        assert items == ["reasoning", "message", "function_call", "function_call"]
    long = [{"role": "user", "content": "ab " * 4000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**asked, "messages": long})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.responses(**{**asks, "input": long})
    litellm.in_memory_llm_clients_cache.flush_cache()
    gc.collect()  # those providers leave their connections to it


def test_a_prompt_is_cached_for_the_next_request(engine: Any, client: openai.OpenAI) -> None:
    text = "a long beginning " * 60 + script(Step("yes"))
    asked: Any = {"model": engine.scripted, "messages": [{"role": "user", "content": text}]}
    first = client.chat.completions.create(**asked)
    again = client.chat.completions.create(**asked)
    assert first.usage is not None
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    cached = again.usage.prompt_tokens_details.cached_tokens or 0
    assert first.usage.prompt_tokens * 0.9 < cached < first.usage.prompt_tokens


@pytest.mark.parametrize(
    "more", [{"prompt": ["one", [40, 41]], "n": 2, "logprobs": 2}, {"prompt": "one", "echo": True}]
)
def test_text_completions_equal_those_of_litellm(engine: Any, more: dict[str, Any]) -> None:
    asked = {"model": engine.vectors, "temperature": 0, "max_tokens": 3, **more}
    whole = engine.http.post("/v1/completions", json=asked).raise_for_status()
    reply = Completion.model_validate_json(whole.text)
    handler = litellm.text_completion(
        **{**asked, "model": f"mlx/{engine.vectors}"}, api_base=engine.url, api_key="the-key"
    )
    assert all(c.text for c in reply.choices)
    assert [c.text for c in reply.choices] == [c.text for c in handler.choices]
    assert [c.index for c in reply.choices] == list(range(len(handler.choices)))
    for ours, theirs in zip(reply.choices, handler.choices, strict=True):
        found = theirs.model_dump().get("logprobs") or {}
        given = ours.logprobs.model_dump() if ours.logprobs else {}
        assert bool(given) == ("logprobs" in more)
        for name in given.keys() - {"token_logprobs", "top_logprobs"}:
            assert given[name] == found[name]
        # the prompts may share passes or not, which round differently
        wanted = pytest.approx(found.get("token_logprobs", []), abs=1e-4)
        assert given.get("token_logprobs", []) == wanted
        assert list(map(list, given.get("top_logprobs", []))) == list(
            map(list, found.get("top_logprobs", []))
        )
    streamed = engine.http.post("/v1/completions", json=asked | {"stream": True})
    *chunks, last = events(streamed.text)
    assert last == "[DONE]"
    texts = dict.fromkeys(range(len(reply.choices)), "")
    for chunk in map(json.loads, chunks):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
            choice["finish_reason"] = choice["finish_reason"] or "stop"  # the SDK's type lacks null
        Completion.model_validate(chunk)
    assert list(texts.values()) == [c.text for c in reply.choices]


def test_embeddings_equal_those_of_the_litellm_handler(engine: Any, client: openai.OpenAI) -> None:
    given: list[str] = ["one", "two words"]
    found = client.embeddings.create(model=engine.vectors, input=given)
    plain = client.embeddings.create(model=engine.vectors, input=given, encoding_format="float")
    assert [each.embedding for each in found.data] == [each.embedding for each in plain.data]
    assert found.usage.prompt_tokens == plain.usage.total_tokens > 1
    handler = litellm.embedding(
        model=f"mlx/{engine.vectors}", input=given, api_base=engine.url, api_key="the-key"
    )
    assert [each["embedding"] for each in handler.data] == [each.embedding for each in plain.data]


def test_tokenize_returns_the_tokens_of_the_same_request(engine: Any) -> None:
    chat = {"model": engine.scripted, **CASES["thought, text and calls"]}
    used = engine.http.post("/v1/chat/completions", json=chat).json()["usage"]["prompt_tokens"]
    found = engine.http.post("/tokenize", json=chat | {"add_generation_prompt": True}).json()
    assert found["count"] == len(found["tokens"]) == used
    assert found["max_model_len"] == 2048
    begun = {**chat, "messages": [*chat["messages"], {"role": "assistant", "content": "Yes"}]}
    begun |= {"continue_final_message": True, "add_generation_prompt": False}
    assert engine.http.post("/tokenize", json=begun).json()["count"] > used
    raw = {"model": engine.scripted, "prompt": "one two", "add_special_tokens": True}
    tokens = engine.http.post("/tokenize", json=raw).json()["tokens"]
    back = {"model": engine.scripted, "tokens": tokens}
    assert engine.http.post("/detokenize", json=back).json() == {"prompt": "one two"}
    for path, wrong in (
        ("/tokenize", {"prompt": ["a", "b"]}),
        ("/tokenize", {"prompt": "a", "add_special_tokens": False}),
        ("/detokenize", {"tokens": [2**31]}),
        ("/detokenize", {"tokens": None}),
        ("/detokenize", {"tokens": ["one"]}),
    ):
        answer = engine.http.post(path, json={"model": engine.scripted, **wrong})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), wrong


def test_the_models_route_lists_and_retrieves_models(client: openai.OpenAI, engine: Any) -> None:
    client.embeddings.create(model=engine.vectors, input="x")
    found = engine.http.get("/v1/models").json()
    assert all(Model.model_validate(model) for model in found["data"])
    assert engine.vectors in [model.id for model in client.models.list().data]
    assert client.models.retrieve(engine.vectors).id == engine.vectors
    assert client.models.retrieve("demo-hybrid").id == "demo-hybrid"  # is loaded by a request
    with pytest.raises(openai.NotFoundError, match="'no/such' is not loaded"):
        client.models.retrieve("no/such")


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"temprature": 1}, 400, "invalid_request", "temprature"),
        ({"temperature": 3}, 400, "invalid_request", "temperature"),
        ({"stream": 1}, 400, "invalid_request", "stream"),
        ({"stream_options": []}, 400, "invalid_request", "stream_options"),
        ({"messages": "x"}, 400, "invalid_request", "messages"),
        ({"options": {"trust_remote_code": True}}, 400, "invalid_request", "options"),
        ({"origin": "owner"}, 400, "invalid_request", "origin"),
        ({"tenant": "other"}, 400, "invalid_request", "tenant"),
        ({"model": "no/such"}, 404, "model_not_found", None),
        ({"model": None}, 400, "invalid_request", "model"),
        ({"messages": [{"role": "user", "content": "ab " * 4000}]}, 400, "context_length_exceeded",
         "messages"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_has_openais_form(
    engine: Any, fields: dict[str, Any], status: int, code: str, param: str | None, stream: bool
) -> None:
    body = {"model": engine.scripted, "messages": [{"role": "user", "content": "x"}]}
    answer = engine.http.post("/v1/chat/completions", json={**body, "stream": stream, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert error["type"] == "invalid_request_error"
    assert error.keys() == {"message", "type", "param", "code"}
    if code != "model_not_found":
        assert error["param"] == param


def test_chat_parameters_without_effect_are_named_in_a_header(engine: Any) -> None:
    body = {"model": engine.scripted, "messages": [{"role": "user", "content": "x"}]}
    more = {"store": True, "metadata": {"a": "b"}, "max_completion_tokens": 1}
    for stream in (False, True):
        asked = body | more | {"stream": stream}
        answer = engine.http.post("/v1/chat/completions", json=asked).raise_for_status()
        assert "store" in answer.headers["x-mlx-warnings"]
        assert "metadata" not in answer.headers["x-mlx-warnings"]
