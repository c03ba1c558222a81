"""Converts messages and tools into the form that a chat template accepts."""

import hashlib
import json
import string
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...records import TemplateForm

SHORT_ID = 9
LETTERS = string.ascii_letters + string.digits
BLANK_LINE = "\n\n"
Message = Mapping[str, Any]


def fit_messages(messages: Sequence[Message], form: TemplateForm) -> list[dict[str, Any]]:
    """`messages`: canonical (`chat.messages.normalise`: results follow their calls in order).
    Changes no input."""
    numbered = form.short_ids or form.named_ids
    ordered = list(_with_ids(messages, form)) if numbered else messages
    ordered = ordered if form.parallel_calls else _one_by_one(ordered)
    ordered = ordered if form.user_after_result else _users_in_results(ordered)
    if not form.lone_system and [message.get("role") for message in ordered] == ["system"]:
        ordered = [{**ordered[0], "role": "user"}]
    fitted = [each for message in ordered for each in _turns(message, form)]
    if form.parts_only:
        for message in fitted:
            if isinstance(message.get("content"), str):
                message["content"] = [{"type": "text", "text": message["content"]}]
    return fitted


def fit_tools(tools: Sequence[Message], form: TemplateForm) -> list[dict[str, Any]]:
    return [_tool(tool, form) for tool in tools]


def short_id(call_id: str) -> str:
    """Nine letters and digits: the id itself if it has that form, else a digest of it."""
    if len(call_id) == SHORT_ID and all(character in LETTERS for character in call_id):
        return call_id
    digest = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).digest())
    return "".join(LETTERS[digest // 62**place % 62] for place in range(SHORT_ID))


def call_ids(messages: Sequence[Message]) -> frozenset[str]:
    turns = (message for message in messages if message.get("role") == "assistant")
    calls = (call for turn in turns for call in turn.get("tool_calls") or ())
    ids = [str(call["id"]) for call in calls if call.get("id") is not None]
    return frozenset((*ids, *map(short_id, ids)))


def _turns(message: Message, form: TemplateForm) -> Iterator[dict[str, Any]]:
    if message.get("role") == "tool" and form.short_ids and message.get("tool_call_id"):
        yield {**message, "tool_call_id": short_id(message["tool_call_id"])}
        return
    calls = message.get("tool_calls")
    if not calls:
        yield dict(message)
        return
    turn = {**message, "tool_calls": [_call(call, form) for call in calls]}
    thought = turn.get("reasoning_content")
    if thought and turn.get("content") and not form.thought_with_text:
        turn = _without_thought(turn)
    if turn.get("content") and form.text_with_calls == "apart":
        apart = ("tool_calls", *(("reasoning_content",) if form.thought_with_calls else ()))
        yield {key: value for key, value in turn.items() if key not in apart}
        calling = {key: turn[key] for key in apart if key in turn}
        turn = {"role": turn["role"], "content": None, **calling}
    elif form.text_with_calls == "dropped":
        turn["content"] = None
    if not turn.get("content"):
        turn["content"] = "" if form.empty_content == "empty" else None
        if form.empty_content == "absent":
            del turn["content"]
    yield turn


def _without_thought(turn: Message) -> dict[str, Any]:
    content, thought = turn["content"], turn["reasoning_content"]
    bare = {key: value for key, value in turn.items() if key != "reasoning_content"}
    if isinstance(content, str):
        return {**bare, "content": thought + BLANK_LINE + content}
    return {**bare, "content": [{"type": "text", "text": thought}, *content]}


def _call(call: Message, form: TemplateForm) -> dict[str, Any]:
    function = call["function"]
    if form.arguments == "text":
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        function = {**function, "arguments": arguments}
    fitted = {**call, "function": function}
    if form.short_ids and "id" in call:
        fitted["id"] = short_id(str(call["id"]))  # clients may send a number
    return fitted


def _with_ids(messages: Sequence[Message], form: TemplateForm) -> Iterator[Message]:
    """Calls with the ids that `form` demands, by name and position or at least by position, and
    results with the ids of their calls."""
    count, waiting = 0, deque[str]()
    for message in messages:
        if calls := message.get("tool_calls"):
            if form.named_ids:
                calls = [
                    {**call, "id": f"functions.{call['function']['name']}:{at}"}
                    for at, call in enumerate(calls, count)
                ]
            else:
                calls = [{"id": f"call_{at}", **call} for at, call in enumerate(calls, count)]
            count += len(calls)
            waiting = deque(str(call["id"]) for call in calls)
            yield {**message, "tool_calls": calls}
        elif message.get("role") == "tool" and waiting:
            yield {**message, "tool_call_id": waiting.popleft()}
        else:
            yield message


def _users_in_results(messages: Sequence[Message]) -> list[Message]:
    """Move a user's text to the end of the result before it."""
    joined: list[Message] = []
    for message in messages:
        last: Message = joined[-1] if joined else {}
        texts = last.get("content"), message.get("content")
        after_result = (last.get("role"), message.get("role")) == ("tool", "user")
        if after_result and all(isinstance(text, str) for text in texts):
            joined[-1] = {**last, "content": BLANK_LINE.join(filter(None, texts))}
        else:
            joined.append(message)
    return joined


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Each call of a turn as a separate turn before its result."""
    ordered: list[Message] = []
    waiting = deque[Message]()
    for message in messages:
        if message.get("role") != "tool":
            ordered += waiting
            waiting.clear()
        ordered.append(message)
        calls = message.get("tool_calls") or ()
        if len(calls) > 1:
            ordered[-1] = {**message, "tool_calls": calls[:1]}
            waiting.extend(
                {"role": message["role"], "content": None, "tool_calls": [call]}
                for call in calls[1:]
            )
        elif message.get("role") == "tool" and waiting:
            ordered.append(waiting.popleft())
    return [*ordered, *waiting]


def _tool(tool: Message, form: TemplateForm) -> dict[str, Any]:
    if not isinstance(tool.get("function"), Mapping):
        return dict(tool)
    function = dict(tool["function"])
    if "description" in form.tool_fields and function.get("description") is None:
        function["description"] = ""
    if "parameters" in form.tool_fields and not function.get("parameters"):
        function["parameters"] = {"type": "object", "properties": {}}
    if isinstance(function.get("parameters"), Mapping):
        function["parameters"] = _schema(function["parameters"], form)
    return {**tool, "function": function}


def _schema(schema: Any, form: TemplateForm, *, described: bool = False) -> Any:
    """Add the fields that `form` requires, at any depth. `described`: it is a parameter's."""
    if isinstance(schema, (list, tuple)):
        return [_schema(each, form) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    fitted = {
        key: _keyword(key, value, form)
        for key, value in schema.items()
        if value is not None or key in ("const", "default")
    }
    types = fitted.get("type")
    if isinstance(types, list) and not form.type_lists:
        named = [each for each in types if each != "null"] or ["null"]
        del fitted["type"]
        either = {"anyOf": [{"type": each} for each in named]}
        fitted |= {"type": named[0]} if len(named) == 1 else either
    if described and "properties" in form.tool_fields and fitted.get("description") is None:
        fitted["description"] = ""
    if "additionalProperties" in form.tool_fields and fitted.get("type") == "object":
        fitted.setdefault("additionalProperties", {})
    return fitted


def _keyword(key: str, value: Any, form: TemplateForm) -> Any:
    if key in ("properties", "$defs", "definitions") and isinstance(value, Mapping):
        return {name: _schema(each, form, described=True) for name, each in value.items()}
    if key in ("enum", "const", "default", "examples", "required"):
        return value
    return _schema(value, form)
