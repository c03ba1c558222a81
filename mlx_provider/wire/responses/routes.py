"""The routes of the Responses API: its parameters as those of chat."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ...errors import ContextTooLong, MLXProviderError, wrong_part
from ...protocol.requests import GenerateRequest
from ..api import ClientNames, ParsedRequest, Read
from ..openai.parameters import SCHEMA, Parameters, WithoutEffect, parameter_names
from ..openai.request import AnswerForm, generate_requests
from .conversation import ABSENT, ChatTools, check_parameters, messages_of
from .reply import Stream, Whole, echo_of, failed_stream

STORED = {
    **ABSENT,
    "previous_response_id": "answers are not stored: send the whole conversation as input",
    "conversation": "conversations are not stored: send the whole conversation as input",
}
OWN = ("model", "input", "instructions", "text", "reasoning", "include", "tools", "tool_choice")
NAMES = {
    "logprobs": "top_logprobs",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
}
WITHOUT_EFFECT: Mapping[str, WithoutEffect] = {
    **dict.fromkeys(("client_metadata", "prompt_cache_options", *STORED)),
    "access_programs": (),
    "background_options": (),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "truncation": ("disabled",),
}
LOGPROBS = "message.output_text.logprobs"


def response_request(
    body: Mapping[str, Any], sender: Mapping[str, Any]
) -> tuple[GenerateRequest, ClientNames, ChatTools]:
    check_parameters(body, STORED)
    instructions = Parameters(body).typed("instructions", str)
    tools = ChatTools.read(body.get("tools"))
    values = {name: value for name, value in body.items() if name not in OWN}
    own = Parameters(values)
    for name, here in NAMES.items():
        own.choice(name, (), f"the Responses API has {here} in its place")
    values |= _text(body) | _logprobs(body)
    values |= {"reasoning_effort": body.get("reasoning"), "tools": tools.tools}
    values["tool_choice"] = tools.choice(body.get("tool_choice"))
    values["max_tokens"] = values.pop("max_output_tokens", None)
    params = Parameters(values, WITHOUT_EFFECT, tools.ignored)
    params.choice("n", (1,), "send the request again for another answer")
    messages, places = messages_of(body.get("input"), instructions)
    if not messages:
        raise wrong_part("input", "must hold at least one item")
    fields = {**sender, "model": body.get("model")}
    names = ClientNames(_names(body) | tools.places | places).before(parameter_names(values))
    with names.naming():
        (request,) = generate_requests(params, fields, messages, AnswerForm())
    return request, names, tools


def _names(body: Mapping[str, Any]) -> dict[str, str]:
    names = {**NAMES, "response_format.json_schema": "text.format", SCHEMA: "text.format.schema"}
    if not isinstance(body.get("reasoning"), Mapping):
        names["reasoning_effort"] = "reasoning"
    return names


def _text(body: Mapping[str, Any]) -> dict[str, Any]:
    text = Parameters(body).mapping("text")
    form = text.get("format")
    wanted = {"verbosity": text.get("verbosity")}
    if isinstance(form, dict) and form.get("type") == "json_schema":
        wanted["response_format"] = {"type": "json_schema", "json_schema": form}
    elif form is not None:
        wanted["response_format"] = form
    return wanted


def _logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    include = Parameters(body).typed("include", list) or []
    return {"logprobs": True} if LOGPROBS in include or body.get("top_logprobs") else {}


def _respond(body: dict[str, Any], sender: Mapping[str, Any]) -> ParsedRequest:
    streamed = Parameters(body).flag("stream")
    request, names, tools = response_request(body, sender)
    echo = echo_of(body)
    reply = partial(Stream if streamed else Whole, tools=tools, echo=echo)

    def refusal(error: MLXProviderError) -> bytes:
        # Codex shortens a conversation only if a stream says that it is too long.
        if not isinstance(error, ContextTooLong):
            return b""
        return failed_stream(request.id, request.model, error, echo)

    return ParsedRequest([request], reply, names, refusal=refusal if streamed else None)


GENERATE: Mapping[str, Read] = {"/v1/responses": _respond}
ROUTES: Mapping[str, Read] = {**GENERATE, "/v1/responses/input_tokens": _respond}
