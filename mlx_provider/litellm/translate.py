"""Converts a request of OpenAI's APIs, as LiteLLM passes it, to a request of the engine."""

from __future__ import annotations

from typing import Any

from ..protocol.requests import EmbedRequest, GenerateRequest
from ..wire.openai.embed import embed_request
from ..wire.openai.form import AnswerForm
from ..wire.openai.names import names_of
from ..wire.openai.parameters import Parameters
from ..wire.openai.request import generate_requests as requests_of
from ..wire.places import Places
from .call import Call
from .carried import IGNORED, PROMPTS, RETENTION, STOP
from .operator import Caller, chosen_by, engine_options, operator_options, tenant
from .routes import route

SETTLED = (
    "max_retries",
    "extra_headers",
    "allowed_openai_params",
    "include_server_side_tool_invocations",
)


def answer_form(call: Call) -> AnswerForm:
    """Raises `BadRequest` for a wrong `best_of`."""
    return AnswerForm.of(call.params, text=call.text_completion)


def client_names(call: Call) -> Places:
    return names_of(call.params, "prompt" if call.text_completion else "messages")


def generate_requests(call: Call) -> list[GenerateRequest]:
    """One request, or one for each prompt of a text completion. Raises `BadRequest` that names the
    parameter."""
    values = dict(call.params)
    for carried, name in ((STOP, "stop"), (RETENTION, "prompt_cache_retention")):
        if carried in values:
            values[name] = values.pop(carried)
    prompts = values.pop(PROMPTS, None)
    ignored = _tools_without_effect(values, values.pop(IGNORED, None))
    content: Any = call.messages
    if call.text_completion:  # LiteLLM has made a user message of each text
        content = prompts or [message.get("content", "") for message in call.messages]
    return requests_of(
        Parameters(values, SETTLED, ignored),
        # Also from `metadata` and headers.
        {**_sender(call), "session": call.litellm_params.get("litellm_session_id")},
        content,
        answer_form(call),
        continues=route(call.litellm_params).endswith("/messages"),
    )


def _tools_without_effect(values: dict[str, Any], names: Any) -> list[str]:
    """Remove tools that no model can call, and members of others, which a bridge has passed.
    `names`: what `bridged` calls them; `None`: not bridged."""
    if not isinstance(names, list):
        return []
    values.pop("web_search_options", None)  # LiteLLM's form of a web search
    values["tools"] = [
        {"type": "function", "function": tool.get("function")}
        for tool in values.get("tools") or []
        if tool.get("type") == "function"
    ]
    return [*map(str, names)]


def embeddings(call: Call, given: Any) -> tuple[EmbedRequest, str]:
    return embed_request(Parameters(call.params, SETTLED), _sender(call), given)


def _sender(call: Call) -> dict[str, Any]:
    options, caller = operator_options(call.litellm_params), Caller.read(call.litellm_params)
    return {
        "model": call.model,
        "origin": chosen_by(call.litellm_params, call.model),
        "tenant": tenant(options, caller),
        "account": caller.account,
        "share": caller.share,
        "options": engine_options(options),
        "timeout": call.deadline.left(),
    }
