"""Turns requests of the Messages API into those of chat completions. Parts that no model can see
are refused in the system prompt and in a message that a user has just typed. In earlier turns they
become text."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...errors import wrong_part
from ...invalid import quote
from ...protocol.requests import GenerateRequest
from ..api import ClientNames, Turns, check_kind, expect, expect_object, objects, parts_of
from ..openai.request import SCHEMA, Parameters, generate_requests, parameter_names

ROLES = ("user", "assistant", "system")
BLOCKS: Mapping[str, Collection[str]] = {
    "user": ("text", "image", "tool_result", "compaction"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking", "compaction"),
    "system": ("text",),
}
RESULT_BLOCKS = ("text", "image", "tool_reference")  # in a result; a gateway makes text of others
IMAGE_SOURCES = {"base64": "data", "url": "url"}  # by type: the member with the image
MEMBERS = ("name", "description", "strict")  # of a tool, the same in chat
BUILT_IN = ("bash_", "computer_", "memory_", "text_editor_")
"""Types of tools whose schema Anthropic's models know. All other types run on its servers."""
NO_PARALLEL_CALLS = "tool_choice.disable_parallel_tool_use"
CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": None}  # in chat
ERROR_PREFIX = "Error: "
CHAT_ONLY = (
    "function_call functions logprobs max_completion_tokens n parallel_tool_calls response_format"
    " stop top_logprobs user".split()
)
"""Parameters of chat for which the reply has no room, or which have another name here."""


def message_request(
    body: Mapping[str, Any], sender: Mapping[str, Any], *, counted: bool = False
) -> tuple[GenerateRequest, ClientNames]:
    """The request, and the client's names of its parts. Parameters of chat that Anthropic lacks are
    allowed, too. `counted`: only the prompt's tokens are counted, which needs no `max_tokens`."""
    params = Parameters(body)
    if not counted and body.get("max_tokens") is None:
        raise wrong_part("max_tokens", "is missing")
    for name in CHAT_ONLY:
        params.choice(name, (), "the Messages API has no such parameter")
    params.take("cache_control")  # every prompt is cached, as far as there is room
    messages, places = chat_messages(params.take("system"), params.take("messages"))
    values = {
        **chat_tools(params),
        **answer_format(params),
        "stop": params.take("stop_sequences"),
        "user": _session(params.mapping("metadata")),
        "prompt_cache_retention": "24h" if retains(body) else None,
    }
    given = params.rest() | {name: v for name, v in values.items() if v is not None}
    names = ClientNames(_names(body) | places).before(parameter_names(given))
    with names.naming():
        (request,) = generate_requests(Parameters(given), sender, messages, continues=True)
    return request, names


def _names(body: Mapping[str, Any]) -> dict[str, str]:
    """The names of parameters in this API, by those in chat."""
    config, form = body.get("output_config") or {}, _format_name(body.get("output_config"))
    names = {
        "parallel_tool_calls": NO_PARALLEL_CALLS,
        "response_format": form,
        "response_format.json_schema": form,
        SCHEMA: f"{form}.schema",
        "stop": "stop_sequences",
    }
    if config.get("effort") is not None:
        names["reasoning_effort"] = "output_config.effort"
    for at in range(len(body.get("tools") or [])):
        tool = f"tools[{at}]"
        names |= {f"{tool}.function": tool, f"{tool}.function.parameters": f"{tool}.input_schema"}
    return names


def _format_name(config: Any) -> str:
    return "output_config.format" if config and config.get("format") else "output_format"


def chat_messages(system: Any, messages: Any) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Messages of chat, and by their path the places in the request. Blocks with text, images and
    thoughts stay in Anthropic's form, which chat reads, too."""
    _check_blocks(system, "system", BLOCKS["system"])
    if not messages:
        raise wrong_part("messages", "must be a list of at least one message")
    turns, listed = Turns(), [*objects(messages, "messages")]
    if system:
        turns.add({"role": "system", "content": system}, "system", "system")
    typed = is_typed([message for _, message in listed[-2:]])
    for at, (where, message) in enumerate(listed, 1):
        role = check_kind(message.get("role"), f"{where}.role", ROLES)
        strict = role == "system" or (typed and at == len(listed))
        _check_blocks(message.get("content"), f"{where}.content", BLOCKS[role] if strict else None)
        _add_turn(turns, message, where)
    return turns.messages, turns.places


def is_typed(last: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a user has typed the last of these (one or two) messages. An agent writes messages
    with results of tools, and the messages after them."""
    return last[-1].get("role") == "user" and not any(map(_has_results, last))


def _has_results(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    blocks = content if isinstance(content, list) else []
    return any(isinstance(b, Mapping) and b.get("type") == "tool_result" for b in blocks)


def _check_blocks(content: Any, where: str, known: Collection[str] | None) -> None:
    for at, kind, block in parts_of(content, where, known):
        if kind == "text":
            expect(block.get("text"), str, at, ".text")
        elif kind == "image" and known is not None:
            check_image(block, at)
        elif kind == "tool_result":
            _check_blocks(block.get("content"), f"{at}.content", None)


def check_image(block: Mapping[str, Any], where: str) -> None:
    """Raises `BadRequest` if the block has no image in one of `IMAGE_SOURCES`."""
    where = f"{where}.source"
    source = expect_object(block.get("source"), where)
    place = IMAGE_SOURCES[check_kind(source.get("type"), f"{where}.type", IMAGE_SOURCES)]
    expect(source.get(place) or None, str, where, f".{place}")


def _add_turn(turns: Turns, message: Mapping[str, Any], where: str) -> None:
    role, content = message["role"], message.get("content")
    if not isinstance(content, list):
        turns.add({"role": role, "content": content}, where)
        return
    blocks = [(block, f"{where}.content[{at}]") for at, block in enumerate(content)]
    for block, at in blocks:  # templates accept no text between calls and their results
        if block["type"] == "tool_result":
            _add_result(turns, block, at)
    calls = [(block, at) for block, at in blocks if block["type"] == "tool_use"]
    others = [(b, at) for b, at in blocks if b["type"] not in ("tool_result", "tool_use")]
    parts = [_part(block) for block, _ in others]
    if calls:
        functions = [_call(block) for block, _ in calls]
        turns.add({"role": role, "content": parts or None, "tool_calls": functions}, where)
    elif others or not content:
        turns.add({"role": role, "content": parts}, where)
    for n, (_, at) in enumerate(others):
        turns.place(f".content[{n}]", at)
    for n, (_, at) in enumerate(calls):
        turns.place(f".tool_calls[{n}]", at)
        turns.place(f".tool_calls[{n}].function", at)
        turns.place(f".tool_calls[{n}].function.arguments", f"{at}.input")


def _add_result(turns: Turns, block: Mapping[str, Any], where: str) -> None:
    content, parts = block.get("content"), []
    if block.get("is_error") is True:
        parts = content if isinstance(content, list) else []
        first = ERROR_PREFIX + content if isinstance(content, str) else ERROR_PREFIX.rstrip()
        content = [{"type": "text", "text": first}, *parts] if parts else first
    turns.add({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}, where)
    turns.place(".tool_call_id", f"{where}.tool_use_id")
    for at in range(len(parts)):
        turns.place(f".content[{at + 1}]", f"{where}.content[{at}]")


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": block.get("input")}
    return {"id": block.get("id"), "type": "function", "function": function}


def _part(block: Mapping[str, Any]) -> Mapping[str, Any]:
    if block["type"] == "compaction":
        return {"type": "text", "text": block.get("content")}
    return block


def chat_tools(params: Parameters) -> dict[str, Any]:
    """The parameters of chat for tools and tool choice, as far as the request has them."""
    tools, choice = params.take("tools"), params.mapping("tool_choice")
    fields: dict[str, Any] = {}
    if tools is not None:
        fields["tools"] = [_tool(tool, where) for where, tool in objects(tools, "tools")]
    if choice:
        fields["tool_choice"] = _choice(choice)
        alone = expect(choice.get("disable_parallel_tool_use") or False, bool, NO_PARALLEL_CALLS)
        fields["parallel_tool_calls"] = not alone
    return fields


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type") or "custom"
    if kind != "custom":
        built_in = isinstance(kind, str) and kind.startswith(BUILT_IN)
        reason = "only Anthropic's models know its schema" if built_in else "no server runs it here"
        remedy = "send a tool of the client's own, with a name and an input_schema"
        raise wrong_part(where, f"is {quote(kind)}: {reason}; {remedy}", ".type")
    expect(tool.get("name"), str, where, ".name")
    schema = expect_object(tool.get("input_schema"), where, ".input_schema")
    given = {name: tool[name] for name in MEMBERS if name in tool}
    function = {**given, "parameters": schema}  # models know this order
    return {"type": "function", "function": function}


def known_members(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Only the members of a tool that chat needs: not its `type` and no `cache_control`."""
    return {name: tool[name] for name in (*MEMBERS, "input_schema") if name in tool}


def _choice(choice: Mapping[str, Any]) -> Any:
    kind = check_kind(choice.get("type"), "tool_choice.type", CHOICES)
    if kind != "tool":
        return CHOICES[kind]
    name = expect(choice.get("name"), str, "tool_choice.name")
    return {"type": "function", "function": {"name": name}}


def answer_format(params: Parameters) -> dict[str, Any]:
    """Chat's `reasoning_effort` and `response_format`, from `output_config` and `output_format`."""
    config, older = params.mapping("output_config"), params.take("output_format")
    form = config.get("format") or older
    fields = {"reasoning_effort": config.get("effort")}
    if form is None:
        return fields
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        raise wrong_part(_format_name(config), f"must be of type json_schema, got {quote(form)}")
    schema = {"name": "output", "schema": form.get("schema")}
    return fields | {"response_format": {"type": "json_schema", "json_schema": schema}}


def cache_marks(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """All `cache_control` of a checked request, its blocks and its tools."""
    messages = [message.get("content") for message in body["messages"]]
    lists = [body.get("system"), body.get("tools"), *messages]
    blocks = [body, *(block for items in lists if isinstance(items, list) for block in items)]
    marks = [block.get("cache_control") for block in blocks if isinstance(block, Mapping)]
    return [mark for mark in marks if isinstance(mark, Mapping)]


def retains(body: Mapping[str, Any]) -> bool:
    """Whether the client wants the prompt to be cached for an hour."""
    return any(mark.get("ttl") == "1h" for mark in cache_marks(body))


def _session(metadata: Mapping[str, Any]) -> str | None:
    """Claude Code names the session in its user id: as JSON, or at its end."""
    user = metadata.get("user_id")
    if not isinstance(user, str):
        return None
    try:
        named = json.loads(user)
    except (ValueError, RecursionError):
        return user.rpartition("_session_")[2]
    found = named.get("session_id") if isinstance(named, dict) else None
    return found if isinstance(found, str) else user
