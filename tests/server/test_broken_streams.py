"""A request that fails after its stream began, as the official SDKs tell their programs."""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import httpx2
import openai
import pytest
from openai.types.responses import ResponseError, ResponseErrorEvent

from mlx_provider.errors import error_classes
from sdk_clients import anthropic_client, openai_client

MODEL = {"model": "fake"}
CODES = [
    "request_failed",
    "memory_in_use",
    "context_length_exceeded",
    "grammar_failed",
    "timeout",
    "overloaded",
    "internal_error",
]
SCHEMA = {"name": "x", "schema": {"type": "object"}}
FORM = {"type": "json_schema", "json_schema": SCHEMA}
OPENAI_TYPES = {408: "timeout_error", 429: "rate_limit_error"}


@pytest.fixture(scope="module")
def served(spawn: Any) -> Any:
    return spawn("--port", "0", MLX_PROVIDER_API_KEY="secret")


@pytest.fixture(scope="module")
def gpt(served: Any) -> Iterator[openai.OpenAI]:
    with openai_client(str(served.http.base_url), "secret") as client:
        yield client


@pytest.fixture(scope="module")
def claude(served: Any) -> Iterator[Any]:
    with anthropic_client(str(served.http.base_url), "secret") as client:
        yield client


def said(prompt: str) -> dict[str, Any]:
    return {**MODEL, "messages": [{"role": "user", "content": prompt}]}


def chat(gpt: openai.OpenAI, prompt: str) -> Iterator[str | None]:
    asked: Any = {**said(prompt), "response_format": FORM}
    for chunk in gpt.chat.completions.create(**asked, stream=True):
        yield chunk.choices[0].delta.content


def chat_helper(gpt: openai.OpenAI, prompt: str) -> Iterator[str | None]:
    asked: Any = {**said(prompt), "response_format": FORM}
    with gpt.chat.completions.stream(**asked) as stream:
        yield from (event.delta for event in stream if event.type == "content.delta")


def text(gpt: openai.OpenAI, prompt: str) -> Iterator[str | None]:
    more: Any = {"extra_body": {"grammar": "start: x"}}
    for chunk in gpt.completions.create(model="fake", prompt=prompt, stream=True, **more):
        yield chunk.choices[0].text


def message(claude: Any, prompt: str) -> Iterator[str | None]:
    asked: Any = {**said(prompt), "max_tokens": 9, "output_config": {"format": FORM | SCHEMA}}
    for event in claude.messages.create(**asked, stream=True):
        if event.type == "content_block_delta" and event.delta.type == "text_delta":
            yield event.delta.text


def message_helper(claude: Any, prompt: str) -> Iterator[str | None]:
    asked: Any = {**said(prompt), "max_tokens": 9, "output_config": {"format": FORM | SCHEMA}}
    with claude.messages.stream(**asked) as stream:
        yield from stream.text_stream


def response(gpt: openai.OpenAI, prompt: str) -> Iterator[Any]:
    form: Any = {"text": {"format": {**FORM, **SCHEMA}}}
    yield from gpt.responses.create(model="fake", input=prompt, stream=True, **form)


def response_helper(gpt: openai.OpenAI, prompt: str) -> Iterator[Any]:
    form: Any = {"text": {"format": {**FORM, **SCHEMA}}}
    with gpt.responses.stream(model="fake", input=prompt, **form) as stream:
        yield from stream


def cases(plain: Any, *other: Any) -> list[tuple[Any, str]]:
    """Every code by one way to read a stream, and one code by the others."""
    return [*((plain, code) for code in CODES), *((each, CODES[0]) for each in other)]


@pytest.mark.parametrize(
    ("way", "code"),
    cases((chat, "response_format"), (chat_helper, "response_format"), (text, "grammar")),
)
def test_the_openai_client_raises_the_error_of_a_broken_stream(
    gpt: openai.OpenAI, way: tuple[Callable[..., Iterator[str | None]], str], code: str
) -> None:
    read, param = way
    found = []
    with pytest.raises(openai.APIError) as caught:
        found.extend(read(gpt, f"break {code}"))
    assert found == ["begun "]
    status = error_classes()[code].status
    error = caught.value
    assert (error.code, error.param) == (code, param)
    other = "server_error" if status >= 500 else "invalid_request_error"
    assert error.type == OPENAI_TYPES.get(status, other)
    assert error.message.endswith(f"{param}: scripted")


@pytest.mark.parametrize(("read", "code"), cases(response, response_helper))
def test_a_broken_responses_stream_ends_with_response_failed(
    gpt: openai.OpenAI, read: Callable[..., Iterator[Any]], code: str
) -> None:
    events = list(read(gpt, f"break {code}"))
    assert [each.delta for each in events if each.type == "response.output_text.delta"] == [
        "begun "
    ]
    told, last = events[-2:]
    assert (told.type, told.code, told.param) == ("error", code, "text.format")
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.message == told.message
    assert told.message.endswith("text.format: scripted")
    ResponseErrorEvent.model_validate(told.model_dump())
    if code != "context_length_exceeded":  # the word that Codex reads
        ResponseError.model_validate(last.response.error.model_dump())
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize(("read", "code"), cases(message, message_helper))
def test_the_anthropic_client_raises_the_error_of_a_broken_stream(
    claude: Any, read: Callable[..., Iterator[str | None]], code: str
) -> None:
    found = []
    from anthropic import APIStatusError

    with pytest.raises(APIStatusError) as caught:
        found.extend(read(claude, f"break {code}"))
    assert found == ["begun "]
    status = error_classes()[code].status
    error = caught.value
    assert error.error_code == code
    other = "api_error" if status >= 500 else "invalid_request_error"
    assert error.type == OPENAI_TYPES.get(status, other)
    assert error.api_message == "output_config.format: scripted"


def test_an_engine_that_is_killed_breaks_streams(spawn: Any) -> None:
    """The connection ends before the reply does, which no client takes for the end."""
    from anthropic import APIError

    engine = spawn("--port", "0", MLX_PROVIDER_API_KEY="secret")
    url = str(engine.http.base_url)
    asked: Any = said("wait")
    with openai_client(url, "secret") as gpt, anthropic_client(url, "secret") as claude:
        streams: list[Any] = [
            gpt.chat.completions.create(**asked, stream=True),
            gpt.responses.create(model="fake", input="wait", stream=True),
            claude.messages.create(**asked, max_tokens=9, stream=True),
        ]
        assert engine.end(signal.SIGKILL) == -signal.SIGKILL
        for stream in streams:
            broken = (openai.APIError, APIError, httpx.HTTPError, httpx2.HTTPError)
            with pytest.raises(broken):
                list(stream)
