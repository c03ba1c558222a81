"""Turns the arguments of LiteLLM's custom handler into requests of the engine, and carries what
LiteLLM (1.106.2) would lose. Parameters that it drops get other names. Warnings, and why a reply on
/v1/messages ended, are kept in the logging object of the call, which handler and hooks share."""

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
"""Settings of LiteLLM's router, or parameters of a request, that name other models to try."""
CARRIED = {"stop": "mlx_stop", "prompt_cache_retention": "mlx_retention"}
"""By parameter: the name under which LiteLLM passes it on."""
STOP_LIMIT = 4  # LiteLLM cuts longer lists silently (1.106.2, `validate_openai_optional_params`)
PRIVATE = f"mlx{secrets.token_hex(8)}"  # begins names that no client can guess
PROMPTS, IGNORED = f"{PRIVATE}_prompts", f"{PRIVATE}_ignored"
"""Parameters that the hook adds. `PROMPTS`: those of a completion, if one is not a text. `IGNORED`:
tools without effect, such as `tools[0] (web_search)`. A request has this list, perhaps empty, if
LiteLLM turns it into chat."""
WARNINGS, ENDING = "mlx_warnings", "mlx_ending"  # keys of `model_call_details`
LAST_EVENT = b"event: message_delta\n"  # of a stream on /v1/messages: with the stop reason
ENCODED = re.compile(PRIVATE + "((%[0-9A-F]{2})+)")  # a name of `encode_model`
WITHOUT_EFFECT: Mapping[str, None] = dict.fromkeys((
    "max_retries", "extra_headers", "allowed_openai_params", "include_server_side_tool_invocations",
))  # fmt: skip
"""Parameters for LiteLLM that also reach our handler."""


class Call:
    """LiteLLM's arguments of one call. Raises `BadRequest` for a wrong `extra_body` or timeout."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        params = dict(given.get("optional_params") or {})
        extra = params.pop("extra_body", None) or {}
        if not isinstance(extra, Mapping):
            raise wrong_part("extra_body", "must be an object")
        self.model = decode_model(given["model"])
        self.messages: list[Any] = given.get("messages") or []
        self.params = {n: value for n, value in {**params, **extra}.items() if value is not None}
        """The client's parameters, such as `temperature`."""
        self.litellm_params: Mapping[str, Any] = given.get("litellm_params") or {}
        """About the call: its config entry, the caller, the client's body."""
        self.api_base: str | None = given.get("api_base") or None
        self.api_key: str | None = given.get("api_key") or None
        self.deadline = Deadline(given.get("timeout"))
        self.logging = given["logging_obj"]  # LiteLLM's object for this call
        self.text = self.litellm_params.get("text_completion") is True
        """Whether the prompt is a raw text: no chat template is applied."""
        self.names = parameter_names(self.params, "prompt" if self.text else "messages")
        """The client's names of parameters, for errors and warnings."""


class Deadline:
    """The time limit of a call, which LiteLLM passes on but never enforces. Begins when it is made.
    `timeout`: seconds, an `httpx.Timeout`, or `None`. Raises `BadRequest` for any other value."""

    def __init__(self, timeout: object) -> None:
        seconds: Any = getattr(timeout, "read", timeout)  # `read` of an `httpx.Timeout`
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and seconds > 0):
            raise BadRequest(f"timeout must be a number of seconds above 0, got {quote(seconds)}")
        self._limit = seconds
        self._ends: float | None = None if seconds is None else time.monotonic() + seconds

    def remaining(self) -> float | None:
        """Seconds; `None`: no limit. Raises `RequestTimedOut` once the limit has passed."""
        if self._ends is None:
            return None
        seconds = self._ends - time.monotonic()
        if seconds <= 0:
            raise self.error()
        return seconds

    def error(self) -> RequestTimedOut:
        """The error that `remaining` raises."""
        return RequestTimedOut(f"the request's time limit of {self._limit:g} s has passed")


def encode_model(model: str) -> str:
    """A private name for a model by whose own name LiteLLM would choose another provider."""
    return PRIVATE + "".join(f"%{byte:02X}" for byte in model.encode())


def decode_model(model: str) -> str:
    """The name that `encode_model` was given. A name that is not encoded is returned unchanged."""
    found = ENCODED.fullmatch(model)
    return unquote(found[1]) if found else model


def generate_requests(call: Call) -> list[GenerateRequest]:
    """One request for the engine, or one per raw prompt. Raises `BadRequest`, `RequestTimedOut`."""
    values = dict(call.params)
    for name, carried in CARRIED.items():  # undoes `carry_params`
        if carried in values:
            values[name] = values.pop(carried)
    prompts = values.pop(PROMPTS, None)
    ignored = _keep_functions(values, values.pop(IGNORED, None))
    content: Any = call.messages
    if call.text:  # LiteLLM has made a user message of each text
        content = prompts or [message.get("content", "") for message in call.messages]
    return openai.generate_requests(
        Parameters(values, WITHOUT_EFFECT, ignored),
        # LiteLLM also takes the session from `metadata` and headers
        {**_sender(call), "session": call.litellm_params.get("litellm_session_id")},
        content,
        text=call.text,
        continues=route(call.litellm_params).endswith("/messages"),  # a last assistant's turn
    )


def _keep_functions(values: dict[str, Any], names: Any) -> list[str]:
    """Keep only functions among the tools of a request that LiteLLM has turned into chat. Returns
    `names`, its `IGNORED`; empty for another request."""
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
    """The request for the engine, and how to encode its vectors: `float` or `base64`. `given`: what
    to embed. Raises `BadRequest`, `RequestTimedOut`."""
    return embed_request(Parameters(call.params, WITHOUT_EFFECT), _sender(call), given)


def _sender(call: Call) -> dict[str, Any]:
    """Fields of a request that no parameter of the client sets."""
    options = operator_options(call.litellm_params)
    return {
        "model": call.model,
        "origin": chosen_by(call.litellm_params, call.model),
        **caller_fields(call.litellm_params, options.cache_salt),
        "options": engine_options(options),
        "timeout": call.deadline.remaining(),
    }


def route(litellm_params: Mapping[str, Any]) -> str:
    """The proxy's route, such as `/v1/messages`. Empty in a script."""
    for name in ("metadata", "litellm_metadata"):
        found = (litellm_params.get(name) or {}).get("user_api_key_request_route")
        if isinstance(found, str):
            return found
    return ""


def reads_errors_in_streams(litellm_params: Mapping[str, Any]) -> bool:
    """Whether a stream reports a full context by an event: on /v1/responses, where Codex reads that
    event (`response.failed`), and ends its session after a status 400. Not if a fallback to another
    model is set: then LiteLLM needs the error before the stream begins."""
    if not route(litellm_params).endswith("/responses"):
        return False
    body = (litellm_params.get("proxy_server_request") or {}).get("body") or {}
    group = (litellm_params.get("metadata") or {}).get("model_group")
    router = getattr(proxy_server(), "llm_router", None)
    return not any(
        body.get(name) or _has_fallback(getattr(router, name, None), group or body.get("model"))
        for name in FALLBACKS
    )


def _has_fallback(fallbacks: Any, group: Any) -> bool:
    entries: Iterable[Any] = fallbacks if isinstance(fallbacks, list | tuple) else ()
    return any(isinstance(entry, Mapping) and {group, "*"} & entry.keys() for entry in entries)


def carry_params(kwargs: dict[str, Any]) -> None:
    """Rename the parameters that LiteLLM would lose: see `CARRIED`. A short `stop` is not lost."""
    for name, carried in CARRIED.items():
        value = kwargs.get(name)
        is_short = not isinstance(value, list) or len(value) <= STOP_LIMIT
        if value is not None and not (name == "stop" and is_short):
            kwargs[carried] = kwargs.pop(name)


def carry_prompts(kwargs: dict[str, Any]) -> None:
    """If a prompt of a completion is a list of token ids, move all prompts to `PROMPTS`: LiteLLM
    would make messages of them. Raises `BadRequest` if `prompt` has another form."""
    prompts = prompt_list(kwargs.get("prompt"), "prompt")
    if not all(isinstance(prompt, str) for prompt in prompts):
        kwargs[PROMPTS], kwargs["prompt"] = prompts, ""


def keep_warnings(logging: Any, warnings: Sequence[str]) -> None:
    """Add warnings to those of the call, for `warning_headers`."""
    if warnings:
        details = _details(logging)
        details[WARNINGS] = list(dict.fromkeys([*details.get(WARNINGS, ()), *warnings]))


def warning_headers(logging: Any) -> dict[str, str] | None:
    """The header of the reply with the warnings of the call. `None`: there are none."""
    found = _details(logging).get(WARNINGS)
    return {f"llm_provider-{HEADER}": header_text(found)} if found else None


def ending_keeper(logging: Any, *, clipped: bool) -> Callable[[Finish], None]:
    """A function to keep why a reply ended. `clipped`: the context had no room for `max_tokens`."""

    def keep(finish: Finish) -> None:
        _details(logging)[ENDING] = ending(finish, clipped=clipped)

    return keep


def with_ending(logging: Any, message: Any) -> Any:
    """`message`; with the kept stop reason if it is a reply on /v1/messages or its `LAST_EVENT`."""
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
