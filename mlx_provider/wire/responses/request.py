"""Parameters of the Responses API as those of chat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import BadRequest
from ...invalid import shown
from ...protocol.requests import GenerateRequest
from ..body import Places
from ..openai.parameters import SCHEMA, Parameters, names_of
from ..openai.prompts import AnswerForm
from ..openai.request import generate_requests
from .conversation import ABSENT, check_input, messages_of
from .tools import ChatTools

STORED = {
    **ABSENT,
    "previous_response_id": "answers are not stored: send the whole conversation as input",
    "conversation": "conversations are not stored: send the whole conversation as input",
}
OWN = ("model", "input", "instructions", "text", "reasoning", "include", "tools", "tool_choice")
SETTLED = ("client_metadata", "prompt_cache_options", *STORED)
"""Parameters that change no answer, or whose value asks for nothing."""
NAMES = {
    "logprobs": "top_logprobs",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
}
UNUSED: Mapping[str, tuple[object, ...]] = {
    "access_programs": (),
    "background_options": (),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "truncation": ("disabled",),
}
"""Parameters without effect, and the values that ask for nothing."""
LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True)
class Question:
    request: GenerateRequest
    tools: ChatTools
    places: Places


def question(body: Mapping[str, Any], sender: Mapping[str, Any]) -> Question:
    """Raises `BadRequest` that names the parameter, item or part."""
    check_input(body, STORED)
    instructions = body.get("instructions")
    if not isinstance(instructions, str | None):
        raise BadRequest(
            f"instructions must be a text, got {shown(instructions)}", param="instructions"
        )
    tools = ChatTools.read(body.get("tools"))
    values = {name: value for name, value in body.items() if name not in OWN}
    own = Parameters(values)
    for name, here in NAMES.items():
        own.choice(name, (), f"the Responses API has {here} in its place")
    values |= _text(body) | _logprobs(body)
    values |= {"reasoning_effort": body.get("reasoning"), "tools": tools.tools}
    values["tool_choice"] = tools.choice(body.get("tool_choice"))
    values["max_tokens"] = values.pop("max_output_tokens", None)
    ignored = [*tools.ignored]
    for name, nothing in UNUSED.items():
        value = values.pop(name, None)
        if value is not None and value not in nothing:
            ignored.append(name)
    params = Parameters(values, SETTLED, ignored)
    params.choice("n", (1,), "send the request again for another answer")
    messages, places = messages_of(body.get("input"), instructions)
    if not messages:
        raise BadRequest("input must hold at least one item", param="input")
    fields = {**sender, "model": body.get("model"), "tool_grammars": tools.grammars}
    names = Places(_names(body) | tools.places | places).before(names_of(values))
    with names.naming():
        (request,) = generate_requests(params, fields, messages, AnswerForm())
    return Question(request, tools, names)


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
    include = body.get("include")
    if not isinstance(include, list | None):
        raise BadRequest(f"include must be a list, got {shown(include)}", param="include")
    return {"logprobs": True} if LOGPROBS in (include or []) or body.get("top_logprobs") else {}
