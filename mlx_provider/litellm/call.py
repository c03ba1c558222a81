"""The arguments of LiteLLM's custom handler as a request of the engine, and what LiteLLM (1.106.2)
would lose on the way. Parameters travel under names that it does not drop; warnings and the ending
of a message travel in the logging object of the call, which handler and hooks share."""

import json
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from ..errors import BadRequest, RequestTimedOut, wrong_part
from ..invalid import quote
from ..protocol.events import Finish
from ..protocol.requests import EmbedRequest, GenerateRequest
from ..wire import api
from ..wire.anthropic.routes import ending
from ..wire.api import HEADER, header_text
from ..wire.openai import request as openai
from ..wire.openai.request import Parameters, parameter_names, prompt_list
from ..wire.openai.routes import embed_request
from .model_info import caller_fields, chosen_by, engine_options, operator_options, proxy_server

FALLBACKS = ("context_window_fallbacks", "fallbacks")
CARRIED = {"stop": "mlx_stop", "prompt_cache_retention": "mlx_retention"}
STOP_LIMIT = 4
"""LiteLLM cuts longer `stop` lists silently (1.106.2, `validate_openai_optional_params`)."""
PRIVATE = f"mlx{secrets.token_hex(8)}"  # for names that no client can guess
PROMPTS, IGNORED = f"{PRIVATE}_prompts", f"{PRIVATE}_ignored"
"""Parameters that `hook.py` adds: prompts of a completion that are not text; and, if LiteLLM turns
the request into chat (/v1/responses, /v1/messages), what has no effect in its tools."""
WARNINGS = "mlx_warnings"
ENDING = "mlx_ending"
LAST_EVENT = b"event: message_delta\n"
ENCODED = re.compile(PRIVATE + "((%[0-9A-F]{2})+)")
WITHOUT_EFFECT: Mapping[str, None] = dict.fromkeys((
    "max_retries", "extra_headers", "allowed_openai_params", "include_server_side_tool_invocations",
))  # fmt: skip


class Call:
    def __init__(self, given: Mapping[str, Any]) -> None:
        params = dict(given.get("optional_params") or {})
        extra = params.pop("extra_body", None) or {}
        if not isinstance(extra, Mapping):
            raise wrong_part("extra_body", "must be an object")
        params.update(extra)
        self.model = decode_model(given["model"])
        self.messages: list[Any] = given.get("messages") or []
        self.params = {name: value for name, value in params.items() if value is not None}
        self.litellm_params: Mapping[str, Any] = given.get("litellm_params") or {}
        self.api_base: str | None = given.get("api_base") or None
        self.api_key: str | None = given.get("api_key") or None
        self.deadline = Deadline(given.get("timeout"))
        self.logging = given["logging_obj"]
        self.text = self.litellm_params.get("text_completion") is True  # the prompt is raw
        self.names = parameter_names(self.params, "prompt" if self.text else "messages")


class Deadline:
    """LiteLLM sets a limit in seconds but never enforces it."""

    def __init__(self, timeout: object) -> None:
        seconds: Any = getattr(timeout, "read", timeout)
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (number and seconds > 0):
            raise BadRequest(f"timeout must be a number of seconds above 0, got {quote(seconds)}")
        self._limit = seconds
        self._ends: float | None = None if seconds is None else time.monotonic() + seconds

    def remaining(self) -> float | None:
        if self._ends is None:
            return None
        seconds = self._ends - time.monotonic()
        if seconds <= 0:
            raise self.error()
        return seconds

    def error(self) -> RequestTimedOut:
        return RequestTimedOut(f"the request's time limit of {self._limit:g} s has passed")


def encode_model(model: str) -> str:
    """For a name by which LiteLLM would choose another provider (`hook.py`). `Call` decodes it."""
    return PRIVATE + "".join(f"%{byte:02X}" for byte in model.encode())


def decode_model(model: str) -> str:
    found = ENCODED.fullmatch(model)
    return unquote(found[1]) if found else model


def generate_requests(call: Call) -> list[GenerateRequest]:
    values = dict(call.params)
    for name, carried in CARRIED.items():
        if carried in values:
            values[name] = values.pop(carried)
    prompts = values.pop(PROMPTS, None)
    ignored = _tools_without_effect(values, values.pop(IGNORED, None))
    content: Any = call.messages
    if call.text:  # LiteLLM has made a user message of each text
        content = prompts or [message.get("content", "") for message in call.messages]
    return openai.generate_requests(
        Parameters(values, WITHOUT_EFFECT, ignored),
        # Also from `metadata` and headers.
        {**_sender(call), "session": call.litellm_params.get("litellm_session_id")},
        content,
        text=call.text,
        continues=route(call.litellm_params).endswith("/messages"),
    )


def _tools_without_effect(values: dict[str, Any], names: Any) -> list[str]:
    """Leave in a translated request only functions that a model can call. Returns `names`, what
    `fit.py` found to have no effect; `None`: the request is not translated, and stays as it is."""
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
    """The request, and `float` or `base64`. `given`: LiteLLM's `input`."""
    return embed_request(Parameters(call.params, WITHOUT_EFFECT), _sender(call), given)


def _sender(call: Call) -> dict[str, Any]:
    options = operator_options(call.litellm_params)
    return {
        "model": call.model,
        "origin": chosen_by(call.litellm_params, call.model),
        **caller_fields(call.litellm_params, options.cache_salt),
        "options": engine_options(options),
        "timeout": call.deadline.remaining(),
    }


def route(litellm_params: Mapping[str, Any]) -> str:
    for name in ("metadata", "litellm_metadata"):
        found = (litellm_params.get(name) or {}).get("user_api_key_request_route")
        if isinstance(found, str):
            return found
    return ""


def reads_errors_in_streams(litellm_params: Mapping[str, Any]) -> bool:
    """Whether the client of a stream reads a full context from its events. Codex does
    (`response.failed`), and ends its session after a status 400. A router with a fallback needs the
    error before the stream begins."""
    if not route(litellm_params).endswith("/responses"):
        return False
    body = (litellm_params.get("proxy_server_request") or {}).get("body") or {}
    group = (litellm_params.get("metadata") or {}).get("model_group")
    router = getattr(proxy_server(), "llm_router", None)
    return not any(
        body.get(name) or _names(getattr(router, name, None), group or body.get("model"))
        for name in FALLBACKS
    )


def _names(fallbacks: Any, group: Any) -> bool:
    entries: Iterable[Any] = fallbacks if isinstance(fallbacks, list | tuple) else ()
    return any(isinstance(entry, Mapping) and {group, "*"} & entry.keys() for entry in entries)


def carry_params(kwargs: dict[str, Any]) -> None:
    for name, carried in CARRIED.items():
        value = kwargs.get(name)
        fits = not isinstance(value, list) or len(value) <= STOP_LIMIT
        if value is not None and not (name == "stop" and fits):
            kwargs[carried] = kwargs.pop(name)


def carry_prompts(kwargs: dict[str, Any]) -> None:
    prompts = prompt_list(kwargs.get("prompt"), "prompt")
    if not all(isinstance(prompt, str) for prompt in prompts):
        kwargs[PROMPTS], kwargs["prompt"] = prompts, ""


def keep_warnings(logging: Any, warnings: Sequence[str]) -> None:
    if warnings:
        details = _details(logging)
        details[WARNINGS] = list(dict.fromkeys([*details.get(WARNINGS, ()), *warnings]))


def warning_headers(logging: Any) -> dict[str, str] | None:
    found = _details(logging).get(WARNINGS)
    return {f"llm_provider-{HEADER}": header_text(found)} if found else None


def ending_keeper(logging: Any, *, clipped: bool) -> Callable[[Finish], None]:
    """`clipped`: the context left less room than `max_tokens`."""

    def keep(finish: Finish) -> None:
        _details(logging)[ENDING] = ending(finish, clipped=clipped)

    return keep


def with_ending(logging: Any, message: Any) -> Any:
    fields = _details(logging).get(ENDING)
    if fields and isinstance(message, dict) and message.get("type") == "message":
        return {**message, **fields}
    if fields and isinstance(message, bytes) and message.startswith(LAST_EVENT):
        event = json.loads(message.partition(b"data: ")[2])
        return api.event_frame({**event, "delta": {**event["delta"], **fields}})
    return message


def _details(logging: Any) -> dict[str, Any]:
    details = getattr(logging, "model_call_details", None)
    return details if isinstance(details, dict) else {}
