"""Checks and changes requests before LiteLLM reads them. In a chat LiteLLM fails on a value of a
wrong type, or drops it (1.106.2, `validate_and_fix_openai_messages`). Its bridges, which turn the
Responses and Messages APIs into chat, drop parts of unknown types. Here such a part is refused in a
message that a user has just typed, and becomes text in any other, as on the engine's own routes.

The functions `fit_*` change `kwargs`, return warnings, and raise `BadRequest` that names a part."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from litellm.types.llms.openai import ValidUserMessageContentTypes
from pydantic import BaseModel

from ..chat.messages.normalise import typed_index
from ..chat.messages.parts import foreign_text
from ..errors import BadRequest, wrong_part
from ..invalid import quote
from ..wire.anthropic import request as anthropic
from ..wire.openai.request import Parameters, as_functions
from ..wire.responses import conversation as responses
from ..wire.responses.routes import LOGPROBS
from .call import IGNORED

CARRIED = (*responses.ITEMS, "tool_result", "additional_tools")  # items that the bridge knows
SEARCHES = "litellm.responses.litellm_completion_transformation.client_tool_search"
"""Module of LiteLLM from 1.109 on, whose bridge knows a client's own searches for tools, too."""
SEARCH_ITEMS = ("tool_search_call", "tool_search_output") if find_spec(SEARCHES) else ()
Warnings = list[str]


def _as_text(part: Mapping[str, Any], where: str, warnings: Warnings, kind: str = "text") -> Any:
    warnings.append(f"{where} is of type {part.get('type')!r}: a text takes its place")
    return {"type": kind, "text": foreign_text(part)}


# -- chat


def fit_chat(kwargs: dict[str, Any]) -> Warnings:
    """Change messages to have only parts that LiteLLM accepts (1.106.2,
    `validate_chat_completion_user_messages`). A `video` is renamed `video_url`."""
    messages, warnings = _list_items(kwargs.get("messages"), "messages"), Warnings()
    if messages:
        typed = typed_index(messages)
        kwargs["messages"] = [
            _fit_message(message, index, None if index == typed else warnings)
            if isinstance(message, Mapping)
            else message
            for index, message in enumerate(messages)
        ]
    _check_others(kwargs)
    return warnings


def _check_others(kwargs: Mapping[str, Any]) -> None:
    _list_items(kwargs.get("tools"), "tools")
    for name in ("allowed_openai_params", "additional_drop_params"):
        names = kwargs.get(name) or []
        if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
            raise wrong_part(name, f"must be a list of texts, got {quote(names)}")
    timeout, form = kwargs.get("timeout"), kwargs.get("response_format")
    try:  # numbers and an `httpx.Timeout` pass
        float(timeout if isinstance(timeout, str | list | dict) else 0)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        demand = f"must be a number of seconds, got {quote(timeout)}"
        raise wrong_part("timeout", demand) from None
    if not isinstance(form, Mapping | type | None):  # a script can pass a class
        raise wrong_part("response_format", f"must be an object, got {quote(form)}")


def _list_items(items: Any, name: str) -> list[Any]:
    if not isinstance(items, list | None):
        raise wrong_part(name, f"must be a list, got {type(items).__name__}")
    for index, item in enumerate(items or []):
        if not isinstance(item, Mapping | BaseModel):
            raise wrong_part(name, f"must be an object, got {type(item).__name__}", f".{index}")
    return items or []


def _fit_message(message: Mapping[str, Any], index: int, warnings: Warnings | None) -> Any:
    """`warnings`: `None` for the message just typed, in which unknown parts are refused."""
    role, content, at = message.get("role"), message.get("content"), f"messages.{index}"
    if not isinstance(role, str):
        raise wrong_part(f"{at}.role", f"must be a text, got {quote(role)}")
    if not isinstance(content, str | list | None):
        problem = f"must be a text or a list, got {type(content).__name__}"
        raise wrong_part(f"{at}.content", problem)
    _list_items(message.get("tool_calls"), f"{at}.tool_calls")
    if not isinstance(content, list):
        return message
    parts = [
        _chat_part(part, f"messages[{index}].content[{n}]", warnings if role == "user" else None)
        for n, part in enumerate(_list_items(content, f"{at}.content"))
    ]
    for n, part in enumerate(parts if role == "user" else []):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ValidUserMessageContentTypes:
            known = ", ".join(ValidUserMessageContentTypes)
            unknown = f"unknown type {quote(kind)}, known are {known}"
            raise wrong_part(f"{at}.content.{n}:", unknown)
    return message if parts == content else {**message, "content": parts}


def _chat_part(part: Any, where: str, warnings: Warnings | None) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "video":
        return {"type": "video_url", "video_url": part.get("video")}
    if warnings is None or not isinstance(kind, str) or kind in ValidUserMessageContentTypes:
        return part
    return _as_text(part, where, warnings)


# -- /v1/responses


def fit_responses(kwargs: dict[str, Any]) -> Warnings:
    """Change input items, schema and `logprobs` to what LiteLLM's bridge passes on."""
    responses.check_parameters(kwargs, responses.ABSENT)
    responses.messages_of(kwargs.get("input"))
    include = Parameters(kwargs).take_typed("include", list) or []
    if LOGPROBS in include or kwargs.get("top_logprobs"):
        kwargs["logprobs"] = True  # under chat's name, which the bridge passes on
    items, warnings = kwargs.get("input"), Warnings()
    if isinstance(items, list):
        kwargs["input"] = [_item(item, f"input[{n}]", warnings) for n, item in enumerate(items)]
    _carry_schema(kwargs)
    # without `IGNORED`, the bridge would show tools without effect to the model
    every = _list_items(kwargs.get("tools"), "tools")
    tools = responses.ChatTools([t for t in every if not _runs_in_gateway(t)], lenient=True)
    as_functions(tools.tools)
    kwargs[IGNORED] = tools.ignored
    return warnings


def _item(given: Any, where: str, warnings: Warnings) -> Any:
    item = given.model_dump() if isinstance(given, BaseModel) else given
    searches = SEARCH_ITEMS if item.get("execution") == "client" else ()
    known = responses.known_item(item, (*CARRIED, *searches))
    changed = dict(known)
    for name in ("content", "output"):
        parts = known.get(name)
        if isinstance(parts, list) and known.get("type") != "reasoning":
            kind = "output_text" if known.get("role") == "assistant" else "input_text"
            changed[name] = [
                _item_part(part, kind, f"{where}.{name}[{n}]" if known is item else where, warnings)
                for n, part in enumerate(parts)
            ]
    return given if changed == item else changed


def _item_part(part: Any, kind: str, where: str, warnings: Warnings) -> Any:
    if not isinstance(part, Mapping):
        return part
    if part.get("type") == "refusal":  # which the bridge of 1.106.2 drops
        return {"type": "output_text", "text": str(part.get("refusal") or "")}
    is_known = (part.get("type") or "text") in responses.ITEM_PARTS
    if part.get("type") == "input_image":  # chat has images only by URL
        is_known = bool(part.get("image_url"))
    return part if is_known else _as_text(part, where, warnings, kind)


def _carry_schema(kwargs: dict[str, Any]) -> None:
    """The bridge passes on a schema only in the format `json_schema`."""
    match kwargs.get("text"):
        case {"format": {"type": "json_object", "schema": schema}} if schema:
            if isinstance(schema, Mapping):
                schema = {"type": "object", **schema}
            form = {"type": "json_schema", "name": "json_object", "schema": schema}
            kwargs["text"] = {**kwargs["text"], "format": form}


def _runs_in_gateway(tool: Any) -> bool:
    """Whether LiteLLM runs the tool itself, by MCP."""
    url = tool.get("server_url") if isinstance(tool, Mapping) else None
    return isinstance(url, str) and (url.startswith("litellm_proxy") or "/mcp" in url)


# -- /v1/messages


def fit_messages(kwargs: dict[str, Any]) -> Warnings:
    """Change messages, tools and the reply's format to what LiteLLM's bridge passes on."""
    anthropic.chat_messages(kwargs.get("system"), kwargs.get("messages"))
    warnings = Warnings()
    kwargs["messages"] = [
        _with_blocks(message, anthropic.BLOCKS[message["role"]], f"messages[{at}]", warnings)
        for at, message in enumerate(kwargs["messages"])
    ]
    _carry_format(kwargs)
    _carry_message_tools(kwargs)
    return warnings


def _with_blocks(holder: Any, known: Any, where: str, warnings: Warnings) -> Any:
    content = holder.get("content")
    if not isinstance(content, list):
        return holder
    blocks = [_block(b, known, f"{where}.content[{at}]", warnings) for at, b in enumerate(content)]
    return {**holder, "content": blocks}


def _block(block: Mapping[str, Any], known: Any, where: str, warnings: Warnings) -> Any:
    kind = block.get("type")
    if kind == "tool_result":
        return _with_blocks(block, anthropic.RESULT_BLOCKS, where, warnings)
    try:
        if kind == "image":
            anthropic.check_image(block, where)
        return block if kind in known else _as_text(block, where, warnings)
    except BadRequest:
        return _as_text(block, where, warnings)


def _carry_format(kwargs: dict[str, Any]) -> None:
    """Pass on schema and effort under chat's names. The bridge drops unknown types and an effort
    without adaptive thoughts, and demands every property of an object."""
    given = {name: kwargs.get(name) for name in ("output_config", "output_format")}
    made = anthropic.answer_format(Parameters(given))
    kwargs.update({name: value for name, value in made.items() if value is not None})
    if "response_format" in made:
        kwargs.pop("output_format", None)
        config: Mapping[str, Any] = given["output_config"] or {}
        kwargs["output_config"] = {key: config[key] for key in config if key != "format"}


def _carry_message_tools(kwargs: dict[str, Any]) -> None:
    """Pass on tools, and under chat's names their limit and cache marks. The bridge loses
    `disable_parallel_tool_use` and writes unknown members of a tool into its schema."""
    made = anthropic.chat_tools(
        Parameters({name: kwargs.get(name) for name in ("tools", "tool_choice")})
    )
    as_functions(made.get("tools", []))
    if anthropic.retains(kwargs):  # also by a mark of a tool, which goes below
        kwargs["prompt_cache_retention"] = "24h"
    kwargs[IGNORED] = []
    if kwargs.get("tools"):
        kwargs["tools"] = [anthropic.known_members(tool) for tool in kwargs["tools"]]
    if made.get("parallel_tool_calls") is False:
        kwargs["parallel_tool_calls"] = False
    kwargs.pop("cache_control", None)  # every prompt is cached, as far as there is room
