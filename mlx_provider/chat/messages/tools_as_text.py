"""Calls as text, written by their grammar, and a check that the parser reads them back. And tools,
calls and results in messages, for chat templates that do not support them."""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import BadRequest
from ...families.tokenizer.template import short_id
from ...protocol.requests import GenerateRequest
from ...records import CallGrammar, ToolParser, Tools
from ...records.json_reading import function_of, listed_parameters, resolve
from ...records.parsing import TaggedArguments
from ..constraints.calls import shown_name, written_as_object
from ..constraints.request import demanded_names
from ..output.whole_reply import WholeReply, read_chunks
from .turns import BLANK_LINE


def written_call(
    grammar: CallGrammar, name: str, arguments: Mapping[str, Any], schema: Mapping[str, Any]
) -> str:
    """`schema`: the tool's parameters, by which a format tells text from other values."""
    return written_calls(grammar, [(name, arguments, schema)])


def written_calls(
    grammar: CallGrammar,
    calls: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]],
    ids: Sequence[str] = (),
) -> str:
    """`calls`: name, arguments and schema of each. Without `ids`, formats with ids get made-up
    ones. A format with one call per reply is repeated, one per line."""
    shown = [short_id(call_id) for call_id in ids or map(str, range(len(calls)))]
    texts = []
    for number, (name, arguments, schema) in enumerate(calls):
        before, after = frame(grammar, number, shown[number], name)
        texts.append(before + _body(grammar, arguments, schema) + after)
    if grammar.between is None:
        return "\n".join(f"{grammar.open}{text}{grammar.close}" for text in texts)
    return grammar.open + grammar.between.join(texts) + grammar.close


def frame(grammar: CallGrammar, number: int, call_id: str, name: str) -> tuple[str, str]:
    before = grammar.before.replace("{digits}", str(number)).replace("{id}", call_id)
    after = grammar.after.replace("{id}", call_id)
    return before.replace("{name}", shown_name(grammar, name)), after


def _body(grammar: CallGrammar, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    tags, known = grammar.tagged, listed_parameters(schema)[0]
    if tags is None or written_as_object(tags, known):
        return json.dumps(arguments, ensure_ascii=False)
    return tags.between.join(
        _argument(tags, key, value, resolve(known.get(key), schema), schema)
        for key, value in arguments.items()
    )


def _argument(
    tags: TaggedArguments, key: str, value: Any, schema: Any, root: Mapping[str, Any]
) -> str:
    bare = tags.writes_text(schema, root) and (isinstance(value, str) or not tags.tells_text)
    text = value if bare and isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    start, end = (tags.text if bare else None) or ("", "")
    after = (bare and tags.text_key_after) or tags.key_after
    close = tags.value_after.replace("{key}", key)
    return f"{tags.key_before}{key}{after}{start}{text}{end}{close}"


def check_readable(request: GenerateRequest, parser: ToolParser) -> None:
    """Raise `BadRequest` for a callable tool whose calls the parser would lose: the parser reads a
    call with all parameters, written by the grammar."""
    names = demanded_names(request)
    for tool in request.tools:
        function = function_of(tool)
        name = function.get("name")
        if not isinstance(name, str) or (names and name not in names):
            continue
        parameters = function.get("parameters")
        schema = parameters if isinstance(parameters, dict) else {}
        keys = tuple(listed_parameters(schema)[0])
        text = written_call(parser.call_grammar(), name, dict.fromkeys(keys, "x"), schema)
        found = read_chunks([text], tool_parser=parser, tools=request.tools)
        read = [(called, isinstance(v, dict) and tuple(v)) for called, v in found.whole_calls]
        if found.cut_calls or read != [(name, keys)]:
            raise _unreadable(name, found, parser)


def _unreadable(name: str, found: WholeReply, parser: ToolParser) -> BadRequest:
    lost = "its parameters" if [name] == [called for called, _ in found.calls] else "it"
    return BadRequest(
        f"tool {name!r} cannot be enforced: calls of it are not readable in this model's "
        f"call format ({'; '.join(found.faults) or parser.name}); rename {lost}, or leave "
        "tool_choice at auto",
        param="tools",
    )


Messages = Sequence[Mapping[str, Any]]
EXAMPLE = "example_function"
EXAMPLE_ARGUMENTS = {"first_parameter": "value", "second_parameter": "another value"}


def described_tools(tools: Tools, parser: ToolParser | None) -> str:
    if parser is not None and parser.describe is not None:
        return parser.describe(tools)
    grammar = _grammar(parser)
    example = written_call(grammar, EXAMPLE, EXAMPLE_ARGUMENTS, _EXAMPLE_SCHEMA)
    several = "" if grammar.between is None else " Several calls may follow one another."
    functions = "\n".join(json.dumps(function_of(tool), ensure_ascii=False) for tool in tools)
    return BLANK_LINE.join(
        (
            "You can call the functions in this list. Each line is one function, with a JSON "
            "schema of its parameters:",
            functions,
            "To call a function, write its name and its arguments in exactly this format:",
            example,
            f"End your reply after the call.{several} The results come in the next message.",
        )
    )


_EXAMPLE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in EXAMPLE_ARGUMENTS},
}


def fold_tools(
    messages: Messages, parser: ToolParser | None = None, tools: Tools = ()
) -> list[dict[str, Any]]:
    """Write calls into the assistant's text in the format of `parser`, and results into user text.
    Takes and returns canonical messages (`messages.normalise`). Results of parallel calls name
    their calls. User and assistant alternate afterwards as far as roles permit."""
    functions = map(function_of, tools)
    schemas = {str(function.get("name")): function.get("parameters") for function in functions}
    folded: list[dict[str, Any]] = []
    labels = deque[str]()
    for message in messages:
        calls = message.get("tool_calls") or ()
        turn = _fold(message, _grammar(parser), schemas)
        if len(calls) > 1:
            labels = deque(
                f"Result of call {n}, {c['function']['name']}:" for n, c in enumerate(calls, 1)
            )
        elif message.get("role") != "tool":
            labels.clear()
        elif labels:
            turn = _join({**turn, "content": labels.popleft()}, turn)
        if folded and folded[-1]["role"] == turn["role"] != "system":
            folded[-1] = _join(folded[-1], turn)
        else:
            folded.append(turn)
    return folded


def _grammar(parser: ToolParser | None) -> CallGrammar:
    return CallGrammar.json("", "") if parser is None else parser.call_grammar()


def _fold(
    message: Mapping[str, Any], grammar: CallGrammar, schemas: Mapping[str, Any]
) -> dict[str, Any]:
    kept = {k: v for k, v in message.items() if k not in ("tool_calls", "tool_call_id", "name")}
    if message.get("role") == "tool":
        return {**kept, "role": "user"}
    kept["content"] = kept.get("content") or ""
    calls = message.get("tool_calls") or ()
    if not calls:
        return kept
    functions = [call["function"] for call in calls]
    given = [(f["name"], f["arguments"], schemas.get(f["name"]) or {}) for f in functions]
    ids = [str(call.get("id") or number) for number, call in enumerate(calls)]
    return _join(kept, {"content": written_calls(grammar, given, ids)})


def _join(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    a, b = first["content"], second["content"]
    if isinstance(a, str) and isinstance(b, str):
        return {**first, "content": BLANK_LINE.join(text for text in (a, b) if text)}
    head, tail = _parts(a), _parts(b)
    if head and tail and head[-1]["type"] == tail[0]["type"] == "text":
        both = BLANK_LINE.join((head.pop()["text"], tail.pop(0)["text"]))
        head.append({"type": "text", "text": both})
    return {**first, "content": [*head, *tail]}


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content)
