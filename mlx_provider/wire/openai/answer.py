"""The engine's events as parts of OpenAI's replies: messages, log-probabilities, usage.

Tools of chat: functions, and custom tools, which take a text in place of arguments. The engine
sees a custom tool as a function with one text, whose format is a grammar.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from ...errors import BadRequest, EngineUnavailable
from ...invalid import shown
from ...protocol.events import Delta, Done, Event, Finish, TokenLogprob, ToolCallDelta


@dataclass
class Answer:
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, delta: Delta) -> None:
        self.content.append(delta.content)
        self.reasoning.append(delta.reasoning)
        self.logprobs.extend(delta.logprobs)
        for piece in delta.tool_calls:
            call = self.calls.setdefault(
                piece.index,
                {"id": piece.id, "type": "function", "function": {"name": None, "arguments": ""}},
            )
            call["id"] = call["id"] or piece.id
            call["function"]["name"] = call["function"]["name"] or piece.name
            call["function"]["arguments"] += piece.arguments

    def message(self, *, legacy: bool, custom: Collection[str] = ()) -> dict[str, Any]:
        """`content` is null if there are only calls. `custom`: names of tools."""
        calls = [with_custom(self.calls[index], custom) for index in sorted(self.calls)]
        content = "".join(self.content)
        fields: dict[str, Any] = {"role": "assistant"}
        fields["content"] = None if calls and not content else content
        if calls and legacy:
            fields["function_call"] = calls[0]["function"]
        elif calls:
            fields["tool_calls"] = calls
        if reasoning := "".join(self.reasoning):
            fields["reasoning_content"] = reasoning
        return fields

    def reason(self, *, legacy: bool) -> str:
        return "stop" if self.finish is None else finish_reason(self.finish, legacy=legacy)


def usage_of(done: Done, *, timings: bool = False) -> dict[str, Any]:
    """Cached tokens are fewer than prompt tokens, as LiteLLM's own tests demand. `timings`: add the
    engine's times to the details of the completion. LiteLLM's streams drop other new fields of the
    usage (1.106.2, `calculate_usage`)."""
    usage = done.usage
    times = {"timings": done.timings.model_dump()} if timings else {}
    cached = max(0, min(usage.cached_tokens, usage.prompt_tokens - 1))
    skipped = {"skipped_tokens": usage.skipped_tokens} if usage.skipped_tokens else {}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached, **skipped},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_tokens,
            "rejected_prediction_tokens": usage.drafted_tokens - usage.accepted_tokens,
            **times,
        },
    }


def logprobs_of(tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    if not tokens:
        return None
    return {
        "content": [
            {**_logprob(token), "top_logprobs": [_logprob(other) for other in token.top]}
            for token in tokens
        ],
        "refusal": None,
    }


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "bytes": token.bytes, "logprob": token.logprob}


def text_logprobs(tokens: Sequence[TokenLogprob], begins: int = 0) -> dict[str, Any] | None:
    """In the form of text completions: lists of equal length. `None`: not requested. `begins`:
    characters of the choice before these tokens, for `text_offset`."""
    if not tokens:
        return None
    offsets = [begins]
    for token in tokens:
        offsets.append(offsets[-1] + len(token.token))
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            None if token.logprob is None else {t.token: t.logprob for t in token.top}
            for token in tokens
        ],
        "text_offset": offsets[:-1],
    }


def finish_reason(finish: Finish, *, legacy: bool) -> str:
    """Raises `EngineUnavailable` for a request that the engine cancelled."""
    if finish.reason == "cancelled":
        raise EngineUnavailable("the engine cancelled the request")
    if legacy and finish.reason == "tool_calls":
        return "function_call"
    return finish.reason


def delta_parts(
    event: Delta, *, legacy: bool, custom: Collection[str] = ()
) -> list[dict[str, Any]]:
    """One delta per kind of output, because accumulators of clients take one kind at a time.
    `custom`: names of custom tools, whose calls must be whole (`custom_tools.WholeCalls`)."""
    parts: list[dict[str, Any]] = []
    if event.reasoning:
        parts.append({"reasoning_content": event.reasoning})
    if event.content:
        parts.append({"content": event.content})
    for piece in call_pieces(event.tool_calls, custom):
        call = {"function_call": piece["function"]} if legacy else {"tool_calls": [piece]}
        parts.append(call)
    return parts


def call_pieces(
    deltas: Sequence[ToolCallDelta], custom: Collection[str] = ()
) -> list[dict[str, Any]]:
    """A head with id and name, then joined arguments: LiteLLM's Anthropic bridge would lose
    arguments in the head."""
    pieces: list[dict[str, Any]] = []
    for delta in deltas:
        if delta.name in custom:
            pieces += _custom_pieces(delta)
            continue
        if delta.name is not None:
            pieces.append(_piece(delta.index, delta.id, delta.name, ""))
        if not delta.arguments:
            continue
        last = pieces[-1] if pieces else None
        if last and last["index"] == delta.index and last["function"]["name"] is None:
            last["function"]["arguments"] += delta.arguments
        else:
            pieces.append(_piece(delta.index, None, None, delta.arguments))
    return pieces


def _custom_pieces(delta: ToolCallDelta) -> list[dict[str, Any]]:
    head = {"id": delta.id, "type": "custom", "custom": {"name": delta.name, "input": ""}}
    text = {"custom": {"input": unwrapped(delta.arguments)}}
    return [{"index": delta.index, **head}, {"index": delta.index, **text}]


def _piece(index: int, call_id: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": call_id, "type": "function", "function": function}


TEXT = "content"
"""The parameter of a custom tool, as LiteLLM's bridge names it (1.106.2, `custom_tools.py`)."""
SYNTAXES = ("lark", "regex")
RESULT = ("return", "returns", "response")
"""Members of a function that describe its result; some chat templates read them."""
MEMBERS = {
    "function": ("name", "description", "parameters", "strict", *RESULT),
    "custom": ("name", "description", "format"),
}
SETTLED = ("type", "cache_control", "eager_input_streaming")
MOST_NAMES = 32


def function_of(name: str, form: Any, description: str) -> dict[str, Any]:
    syntax = ""
    if isinstance(form, Mapping) and form.get("type") == "grammar":
        syntax = f"\n\nFormat:\n```{form.get('syntax')}\n{form.get('definition')}\n```"
    text = {"type": "string", "description": f"The {name} content following the specified format"}
    return {
        "description": description + syntax,
        "parameters": {"type": "object", "properties": {TEXT: text}, "required": [TEXT]},
    }


def grammar_of(form: Any, where: str) -> dict[str, str] | None:
    """See `GenerateRequest.tool_grammars`. `None`: any text. `where`: the tool's place. Raises
    `BadRequest` that names it."""
    if form is None or (isinstance(form, Mapping) and form.get("type") == "text"):
        return None
    known = isinstance(form, Mapping) and form.get("type") == "grammar"
    syntax, value = (form.get("syntax"), form.get("definition")) if known else (None, None)
    if syntax not in SYNTAXES or not isinstance(value, str) or not value:
        raise BadRequest(
            f"{where}.format must be of type text, or of type grammar with a syntax (lark or "
            "regex) and a definition",
            param=where,
        )
    return {"type": syntax, "value": value}


def wrapped(text: str) -> str:
    return json.dumps({TEXT: text}, ensure_ascii=False)


def unwrapped(arguments: str) -> str:
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = found.get(TEXT, "") if isinstance(found, dict) else arguments
    return text if isinstance(text, str) else json.dumps(text)


# -- in chat


def names_of(tools: Any) -> frozenset[str]:
    own = [_of(tool).get("name") for tool in _listed(tools)]
    return frozenset(name for name in own if isinstance(name, str))


def as_functions(tools: Sequence[Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields `tools` and `tool_grammars` of a request, and the members of tools without effect:
    each once, with its first place. Raises `BadRequest` that names the tool."""
    functions: list[dict[str, Any]] = []
    grammars: dict[str, Any] = {}
    ignored: dict[str, str] = {}
    for at, tool in enumerate(tools):
        kind = _kind(tool, f"tools[{at}]")
        where, own = f"tools[{at}].{kind}", tool[kind]
        unknown = [f".{name}" for name in without(tool, (*SETTLED, kind))]
        unknown += [f".{kind}.{name}" for name in without(own, MEMBERS[kind])]
        ignored = {name: f"tools[{at}]{name}" for name in unknown} | ignored
        if kind == "function":
            function = {name: value for name, value in own.items() if name in MEMBERS[kind]}
        else:
            function, grammar = _custom_function(own, where)
            grammars |= {own["name"]: grammar} if grammar else {}
        functions.append({"type": "function", "function": function})
    fields = {"tools": functions, "tool_grammars": grammars}
    return {name: value for name, value in fields.items() if value}, [*ignored.values()][
        :MOST_NAMES
    ]


def without(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    return {
        name: value
        for name, value in given.items()
        if name not in known and value not in (None, False)
    }


def _kind(tool: Any, where: str) -> str:
    """`function` or `custom`, which is also the member that describes the tool. Raises `BadRequest`
    for other types."""
    if not isinstance(tool, Mapping):
        raise BadRequest(f"{where} must be an object, got {shown(tool)}", param=where)
    kind = tool.get("type") or "function"
    if not isinstance(kind, str) or kind not in MEMBERS:
        raise BadRequest(
            f"{where}.type is {shown(kind)}: only tools of type function or custom can be called, "
            "and no server runs others here",
            param=where,
        )
    own = tool.get(kind)
    if not isinstance(own, Mapping):
        raise BadRequest(f"{where}.{kind} must be an object with a name", param=where)
    name = own.get("name")
    if not isinstance(name, str) or not name.strip():
        raise BadRequest(f"{where}.{kind}.name must be a text", param=f"{where}.{kind}.name")
    return kind


def _custom_function(own: Mapping[str, Any], where: str) -> tuple[dict[str, Any], Any]:
    form, described = own.get("format"), own.get("description")
    if isinstance(form, Mapping) and isinstance(form.get("grammar"), Mapping):
        form = {**form, **form["grammar"]}
    grammar = grammar_of(form, where)
    name, text = own["name"], described if isinstance(described, str) else ""
    return {"name": name, **function_of(name, form, text)}, grammar


def choice_of(choice: Any) -> Any:
    if _is_custom(choice):
        return {"type": "function", "function": {"name": _of(choice).get("name")}}
    allowed = choice.get("allowed_tools") if isinstance(choice, Mapping) else None
    if not isinstance(allowed, Mapping):
        return choice
    tools = [choice_of(tool) for tool in _listed(allowed.get("tools"))]
    return {**choice, "allowed_tools": {**allowed, "tools": tools}}


def with_functions(messages: Sequence[Any]) -> list[Any]:
    return [_with_functions(message) for message in messages]


def _with_functions(message: Any) -> Any:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not any(map(_is_custom, _listed(calls))):
        return message
    return {**message, "tool_calls": [_as_call(call) for call in _listed(calls)]}


def _as_call(call: Any) -> Any:
    if not _is_custom(call):
        return call
    arguments = wrapped(str(_of(call).get("input") or ""))
    function = {"name": _of(call).get("name"), "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": function}


def with_custom(call: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    function = call["function"]
    if function["name"] not in names:
        return call
    custom = {"name": function["name"], "input": unwrapped(function["arguments"])}
    return {"id": call["id"], "type": "custom", "custom": custom}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_custom(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("type") == "custom"


def _of(value: Any) -> Mapping[str, Any]:
    own = value.get("custom") if _is_custom(value) else None
    return own if isinstance(own, Mapping) else {}


class WholeCalls:
    """Holds the calls of custom tools in a stream back until they are complete."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held: dict[int, ToolCallDelta] = {}
        """The last call of each choice."""

    def of(self, event: Event) -> Iterator[Event]:
        if isinstance(event, Delta) and self._names and event.tool_calls:
            pieces = [each for piece in event.tool_calls for each in self._of(event.index, piece)]
            yield event.model_copy(update={"tool_calls": pieces})
            return
        if isinstance(event, Finish) and event.index in self._held:
            yield Delta(index=event.index, tool_calls=[self._held.pop(event.index)])
        yield event

    def _of(self, choice: int, piece: ToolCallDelta) -> Iterator[ToolCallDelta]:
        held = self._held.get(choice)
        if held is not None and held.index == piece.index:
            whole = held.arguments + piece.arguments
            self._held[choice] = held.model_copy(update={"arguments": whole})
            return
        if held is not None:
            yield self._held.pop(choice)
        if piece.name in self._names:
            self._held[choice] = piece
        else:
            yield piece
