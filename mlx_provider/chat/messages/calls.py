"""Tool calls of earlier assistant turns, as chat templates iterate over them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...bounds import MAX_VALUES, Values
from ...errors import BadRequest


def canonical_calls(message: Mapping[str, Any], path: str) -> tuple[dict[str, Any], ...]:
    """`tool_calls` (or the older `function_call`) with `arguments` as a mapping. Raises
    `BadRequest` that names the call."""
    calls = message.get("tool_calls")
    legacy = message.get("function_call")
    if calls is None and legacy is not None:
        return (_call({"function": legacy}, f"{path}.function_call"),)
    if calls is None:
        return ()
    if not isinstance(calls, (list, tuple)):
        raise BadRequest(f"{path}.tool_calls must be a list", param=f"{path}.tool_calls")
    return tuple(_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls))


def check_arguments(messages: Sequence[Any]) -> None:
    """Raise `BadRequest` for arguments (JSON text) with more values than a request may hold."""
    values = Values()
    for i, message in enumerate(messages):
        for arguments in _argument_texts(message):
            values.take_text(arguments)
            if values.count > MAX_VALUES:
                path = f"messages[{i}]"
                raise BadRequest(
                    f"{path}: the arguments of tool calls hold more than {MAX_VALUES} JSON values",
                    param=path,
                )


def _argument_texts(message: Any) -> Iterator[str]:
    if not isinstance(message, Mapping):
        return
    calls = message.get("tool_calls")
    listed = calls if isinstance(calls, (list, tuple)) else ()
    functions = [call.get("function") for call in listed if isinstance(call, Mapping)]
    for function in (*functions, message.get("function_call")):
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, str):
            yield arguments


def _call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise BadRequest(f"{path} must hold `function` with a `name`", param=path)
    out: dict[str, Any] = {} if call.get("id") is None else {"id": call["id"]}
    out["type"] = "function"
    out["function"] = {"name": name, "arguments": arguments_mapping(function.get("arguments"))}
    return out


def arguments_mapping(arguments: Any) -> dict[str, Any]:
    """A mapping that shares nothing with the input. What is no JSON object is kept whole under
    `value`, so a malformed call in the history neither fails the request nor loses text."""
    if isinstance(arguments, Mapping):
        return copy.deepcopy(dict(arguments))
    if isinstance(arguments, str):
        if not arguments.strip():
            return {}
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {"value": arguments}
    if arguments is None:
        return {}
    if isinstance(arguments, dict):
        return arguments
    return {"value": copy.deepcopy(arguments)}
