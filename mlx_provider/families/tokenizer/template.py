"""A chat template: what it accepts of messages and tools, and its rendering within limits."""

import hashlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from ...bounded_process import BoundedProcesses, ProcessEnded
from ...errors import BadRequest, RequestFailed, UnsupportedModel, for_another
from ...records import TemplateForm
from ...records.parsing import short_id

BLANK_LINE = "\n\n"
Message = Mapping[str, Any]


def fit_messages(messages: Sequence[Message], form: TemplateForm) -> list[dict[str, Any]]:
    """New messages in the form that a template demands. `messages`: canonical
    (`chat.messages.normalise`: results follow their calls in order)."""
    numbered = form.short_ids or form.named_ids
    ordered = list(_with_ids(messages, form)) if numbered else messages
    ordered = ordered if form.parallel_calls else _one_by_one(ordered)
    ordered = ordered if form.user_after_result else _users_in_results(ordered)
    if not form.lone_system and [message.get("role") for message in ordered] == ["system"]:
        ordered = [{**ordered[0], "role": "user"}]
    fitted = [turn for message in ordered for turn in _turns(message, form)]
    if form.parts_only:
        for message in fitted:
            if isinstance(message.get("content"), str):
                message["content"] = [{"type": "text", "text": message["content"]}]
    return fitted


def fit_tools(tools: Sequence[Message], form: TemplateForm) -> list[dict[str, Any]]:
    """New tools with the fields and types that a template demands."""
    return [_tool(tool, form) for tool in tools]


def call_ids(messages: Sequence[Message]) -> frozenset[str]:
    """The ids of all calls, as they are and in their short form. A new call must get another id."""
    turns = (message for message in messages if message.get("role") == "assistant")
    calls = (call for turn in turns for call in turn.get("tool_calls") or ())
    ids = [str(call["id"]) for call in calls if call.get("id") is not None]
    return frozenset((*ids, *map(short_id, ids)))


def _turns(message: Message, form: TemplateForm) -> Iterator[dict[str, Any]]:
    """One message, or two if the text beside calls must be a separate turn."""
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
    """Messages whose calls have ids, by name and position if `form` demands it, and whose results
    have the ids of their calls."""
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
            empty = {"role": message["role"], "content": None}
            waiting.extend({**empty, "tool_calls": [call]} for call in calls[1:])
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
    """Add the fields that `form` requires, at any depth. `described`: of a parameter."""
    if isinstance(schema, (list, tuple)):
        return [_schema(part, form) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    fitted = {
        key: _keyword(key, value, form)
        for key, value in schema.items()
        if value is not None or key in ("const", "default")
    }
    types = fitted.get("type")
    if isinstance(types, list) and not form.type_lists:
        named = [kind for kind in types if kind != "null"] or ["null"]
        del fitted["type"]
        either = {"anyOf": [{"type": kind} for kind in named]}
        fitted |= {"type": named[0]} if len(named) == 1 else either
    if described and "properties" in form.tool_fields and fitted.get("description") is None:
        fitted["description"] = ""
    if "additionalProperties" in form.tool_fields and fitted.get("type") == "object":
        fitted.setdefault("additionalProperties", {})
    return fitted


def _keyword(key: str, value: Any, form: TemplateForm) -> Any:
    if key in ("properties", "$defs", "definitions") and isinstance(value, Mapping):
        return {name: _schema(inner, form, described=True) for name, inner in value.items()}
    if key in ("enum", "const", "default", "examples", "required"):
        return value
    return _schema(value, form)


SECONDS = 4.0
"""Processor time for one rendering, or for all probes of a template. A prompt of 100,000 tokens
takes a few milliseconds."""
CHARACTERS = 4_000_000
"""Characters that a template may write besides its input."""
TIMES = 4
"""Number of times that a template may write its input."""
MEMORY = 2 << 30
"""Bytes that the process may use."""
REMEMBERED = 100_000
"""Most characters of a probe's text that is kept for the next load."""
PROGRAM = Path(__file__).with_name("template_process.py")


class TemplateLimit(UnsupportedModel):
    """The template exceeds a limit on time, memory or output. No other input would help."""


@cache
def _processes() -> BoundedProcesses:
    """Shared by all models of this process, because a template leaves no state behind."""
    return BoundedProcesses(PROGRAM, MEMORY)


def try_render(render: Callable[[], str]) -> str | None:
    """`None`: the template refuses this input. Raises `TemplateLimit`, which ends all attempts."""
    try:
        return render()
    except TemplateLimit:
        raise
    except BadRequest:
        return None


class _Probes:
    """Renders one template's probes in `SECONDS` of processor time in total. Keeps the answers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = SECONDS
        self._refused: TemplateLimit | None = None
        self._answers: dict[bytes, dict[str, Any]] = {}

    def answer(self, key: bytes, ask: Callable[[float], dict[str, Any]]) -> dict[str, Any]:
        with self._lock:
            if self._refused is not None:
                raise for_another(self._refused)
            if key in self._answers:
                return self._answers[key]
            try:
                answer = ask(self._left)
            except TemplateLimit as error:
                self._refused = error
                raise
            self._left -= answer["spent"]
            if self._left <= 0:
                self._refused = _limit_error("it takes too much processor time")
            if len(answer.get("text", "")) <= REMEMBERED:
                self._answers[key] = answer
            return answer


@lru_cache(maxsize=4)
def _probes_of(source: str) -> _Probes:
    """Shared by all loads of models with this template."""
    return _Probes()


@dataclass(frozen=True)
class TemplateRenderer:
    """Renders in a limited process, from any thread. `special_tokens`: such as `bos_token`."""

    source: str
    special_tokens: Mapping[str, Any]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        variables: Mapping[str, Any],
        *,
        generation_prompt: bool,
        probe: bool = False,
    ) -> str:
        """Raises `BadRequest` with the template's message and its line, and `TemplateLimit`. Keys
        with the value None reach the template. Probes share `SECONDS`; their answers are kept."""
        given = _json({"messages": messages, "tools": tools})
        asked = {
            "messages": messages,
            "tools": tools,
            "variables": dict(sorted({**self.special_tokens, **variables}.items())),
            "generation_prompt": generation_prompt,
            "characters": CHARACTERS + TIMES * len(given),
        }

        def ask(seconds: float) -> dict[str, Any]:
            return self._answer({**asked, "seconds": seconds})

        if probe:
            answer = _probes_of(self.source).answer(hashlib.sha256(_json(asked)).digest(), ask)
        else:
            answer = ask(SECONDS)
        if "text" in answer:
            return str(answer["text"])
        raise BadRequest(
            f"the model's chat template refuses these messages: {answer['error']}{_line(answer)}",
            param="messages",
        )

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        key = hashlib.sha256(self.source.encode("utf-8", "surrogatepass")).hexdigest()
        setup = _json({"template": key, "source": self.source, "seconds": SECONDS})
        try:
            reply = _processes().ask(_json({**asked, "template": key}), {key: setup})
        except ProcessEnded as error:
            if not error.reason:
                raise RequestFailed(f"the process that renders chat templates {error}") from None
            raise _limit_error(error.reason) from None
        except OSError as error:
            reason = f"the process that renders chat templates does not start: {error}"
            raise RequestFailed(reason) from None
        answer: dict[str, Any] = json.loads(reply)
        if answer.get("limit"):
            raise _limit_error(f"{answer['error']}{_line(answer)}")
        return answer


def _line(answer: Mapping[str, Any]) -> str:
    return f" (line {answer['line']} of the template)" if answer.get("line") else ""


def _limit_error(reason: str) -> TemplateLimit:
    remedy = "put its maker's chat_template.jinja beside the weights, or take another conversion"
    return TemplateLimit(f"the model's chat template is refused: {reason}; {remedy}", param="model")


def _json(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except (RecursionError, TypeError, ValueError) as error:
        raise BadRequest(f"the messages cannot be rendered: {error}", param="messages") from None
