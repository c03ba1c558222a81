"""Tools, calls and results as text, for chat templates that have no place for them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...records import CallGrammar, ToolParser, Tools
from ...records.json_reading import function_of
from .turns import BLANK_LINE

EXAMPLE = "example_function"  # the call that shows the format
EXAMPLE_ARGUMENTS = {"first_parameter": "value", "second_parameter": "another value"}
EXAMPLE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in EXAMPLE_ARGUMENTS},
}


def describe_tools(tools: Tools, parser: ToolParser | None) -> str:
    """The text of a system message with the tools, and how to call them in `parser`'s format."""
    if parser is not None and parser.describe is not None:
        return parser.describe(tools)
    grammar = _grammar(parser)
    several = "" if grammar.between is None else " Several calls may follow one another."
    functions = "\n".join(json.dumps(function_of(tool), ensure_ascii=False) for tool in tools)
    return BLANK_LINE.join(
        (
            "You can call the functions in this list. Each line is one function, with a JSON "
            "schema of its parameters:",
            functions,
            "To call a function, write its name and its arguments in exactly this format:",
            grammar.write(EXAMPLE, EXAMPLE_ARGUMENTS, EXAMPLE_SCHEMA),
            f"End your reply after the call.{several} The results come in the next message.",
        )
    )


def write_as_text(
    messages: Sequence[Mapping[str, Any]], parser: ToolParser | None = None, tools: Tools = ()
) -> list[dict[str, Any]]:
    """Write calls into the assistant's text in the format of `parser`, and results into user text.
    Takes and returns canonical messages (`messages.normalise`), where results have the order of the
    calls. Results of parallel calls name their calls. Messages of one role in a row become one, so
    that user and assistant alternate; system messages stay."""
    functions = map(function_of, tools)
    schemas = {str(function.get("name")): function.get("parameters") for function in functions}
    written: list[dict[str, Any]] = []
    headings: list[str] = []
    for message in messages:
        if message.get("role") == "tool":
            heading = headings.pop(0) if headings else ""
            content = _join_contents(heading, message["content"])
            turn = {**_without_calls(message), "role": "user", "content": content}
        else:
            turn = _calls_as_text(message, _grammar(parser), schemas)
            headings = _result_headings(message.get("tool_calls") or ())
        if written and written[-1]["role"] == turn["role"] != "system":
            written[-1] = _join(written[-1], turn)
        else:
            written.append(turn)
    return written


def _grammar(parser: ToolParser | None) -> CallGrammar:
    return CallGrammar.json("", "") if parser is None else parser.call_grammar()


def _result_headings(calls: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line above each of the results that follow; a single one needs none."""
    if len(calls) < 2:
        return []
    names = [call["function"]["name"] for call in calls]
    return [f"Result of call {number}, {name}:" for number, name in enumerate(names, 1)]


def _calls_as_text(
    message: Mapping[str, Any], grammar: CallGrammar, schemas: Mapping[str, Any]
) -> dict[str, Any]:
    turn = {**_without_calls(message), "content": message.get("content") or ""}
    calls = message.get("tool_calls") or ()
    if not calls:
        return turn
    functions = [call["function"] for call in calls]
    named_calls = [(f["name"], f["arguments"], schemas.get(f["name"]) or {}) for f in functions]
    ids = [str(call.get("id") or number) for number, call in enumerate(calls)]
    return _join(turn, {"content": grammar.write_all(named_calls, ids)})


def _without_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in message.items() if k not in ("tool_calls", "tool_call_id", "name")}


def _join(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """One turn with the content and the reasoning of both."""
    thoughts = [t for turn in (first, second) if (t := turn.get("reasoning_content"))]
    reasoning = {"reasoning_content": BLANK_LINE.join(thoughts)} if thoughts else {}
    return {**first, **reasoning, "content": _join_contents(first["content"], second["content"])}


def _join_contents(first: Any, second: Any) -> Any:
    """Two texts, or lists of parts, as one."""
    if isinstance(first, str) and isinstance(second, str):
        return BLANK_LINE.join(text for text in (first, second) if text)
    head, tail = _parts(first), _parts(second)
    if head and tail and head[-1]["type"] == tail[0]["type"] == "text":
        both = BLANK_LINE.join((head.pop()["text"], tail.pop(0)["text"]))
        head.append({"type": "text", "text": both})
    return [*head, *tail]


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content)
