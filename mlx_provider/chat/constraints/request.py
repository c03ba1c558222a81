"""The form that a request demands of its reply, as a grammar."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...errors import BadRequest
from ...protocol.requests import GenerateRequest
from ...records.json_reading import function_of, listed_parameters
from ...records.parsing import CallGrammar, MessageGrammar
from .calls import CallRules, tool_functions
from .patterns import between_slashes, text_pattern
from .schema import ONE_LINE, Function, SchemaReader, Split, Whitespace, json_rule, literal
from .trial import MAX_GRAMMAR

Compiles = Callable[[str], str]


@dataclass(frozen=True)
class Form:
    """A grammar (Lark, rule `start`), and warnings about what it does not enforce."""

    lark: str
    warnings: tuple[str, ...] = ()
    after_lead: bool = False
    """White space may precede it, as models write it after their thoughts."""
    begins_json: bool = False
    """White space may precede it, because it may begin with JSON."""


def request_form(
    request: GenerateRequest,
    calls: CallGrammar | None,
    split: Split,
    compiles: Compiles,
    preface: str = "",
    spaces: Whitespace = ONE_LINE,
) -> Form | None:
    """`None`: any text is allowed. `calls`: the tool parser's call format; `None`: bare JSON
    objects. `preface`: what the model's format writes before an answer. Raises `BadRequest` that
    names the parameter, and for schemas the keyword."""
    names = demanded_names(request)
    answer = _answer(request, compiles, literal(preface, split), spaces)
    optional = names is None
    free = optional and answer is None and not preface and _may_enforce(request, calls, split)
    if optional and not free:
        may_answer = answer is not None and answer.after_lead
        if not may_answer or not _may_call(request, calls):
            return answer
    warnings: list[str] = []
    functions = tool_functions(
        request.tools,
        lambda schema: compiles(f"start: {json_rule(schema, spaces)}"),
        names or None,
        warnings,
    )
    functions = [_with_text(function, request, compiles) for function in functions]
    several = request.parallel_tool_calls and not (names and len(names) == 1)
    rules = CallRules(calls or BARE_JSON, functions, split, several, spaces)
    lark = f"start: calls\n{rules.lark()}"
    if free:
        lark = lark.replace("start: calls", f"start: {FREE}? calls?\n{FREE}: /(?s:.+)/", 1)
    elif optional and answer is not None:
        either = answer.lark.replace("start: answer", "start: answer | calls", 1)
        schema = rules.json_schema()  # has the lexemes of an answer in JSON
        written = lark.removeprefix("start: calls\n")
        lark = f"{either}\n{f'calls: {json_rule(schema, spaces)}' if schema else written}"
    wrong = compiles(lark)
    if wrong:
        raise BadRequest(f"tools cannot be enforced: {wrong}", param="tools")
    begins_json = answer is not None and answer.begins_json
    noted = (*warnings, *rules.warnings)
    return Form(lark, noted, after_lead=True, begins_json=optional and begins_json)


def after_message(form: Form, messages: MessageGrammar, split: Split) -> Form:
    """The form after an optional thought, for formats that address every message. Only if the end
    of a thought is a special token, which no text contains."""
    opened, ended = literal(messages.thought, split), split(messages.thought_end)
    if len(ended) != 1 or isinstance(ended[0], str):
        return form
    closed = literal(messages.thought_end + messages.next, split)
    lark = form.lark.replace("start:", "start: thought? message\nmessage:", 1)
    return replace(form, lark=f"{lark}\nthought: {opened} THOUGHT {closed}\nTHOUGHT: /(?s:.*)/")


BARE_JSON = CallGrammar.json("", "")
FREE = "FREE"


def _may_enforce(request: GenerateRequest, calls: CallGrammar | None, split: Split) -> bool:
    """Whether a reply is free text up to a call with a grammar. Only a special token can end the
    text."""
    if not request.tool_grammars or calls is None or not _may_call(request, calls):
        return False
    return isinstance(next(iter(split(calls.open + calls.before)), ""), int)


def _with_text(function: Function, request: GenerateRequest, compiles: Compiles) -> Function:
    grammar = request.tool_grammars.get(function.name)
    if not isinstance(grammar, Mapping):
        return function
    try:
        form = _free_grammar(grammar, compiles, "")
    except BadRequest as error:
        named = [function_of(tool).get("name") for tool in request.tools]
        where = f"tools[{named.index(function.name)}].function"
        raise BadRequest(f"{where}.format: {error.message}", param=where) from None
    try:
        text = text_pattern(form.lark)
    except ValueError as unsupported:
        raise BadRequest(
            f"the format of the tool {function.name!r} cannot be enforced: {unsupported} is not "
            "supported",
            param="tools",
        ) from None
    name = next(iter(listed_parameters(function.schema)[0]))
    value = {"type": "string", "pattern": f"^{text}$"}
    properties = {**function.schema.get("properties", {}), name: value}
    return replace(function, text=text, schema={**function.schema, "properties": properties})


def _may_call(request: GenerateRequest, calls: CallGrammar | None) -> bool:
    return bool(request.tools) and calls is not None and request.tool_choice != "none"


def demanded_names(request: GenerateRequest) -> list[str] | None:
    """Names of tools, one of which must be called. Empty: any tool. `None`: no call is demanded."""
    choice = request.tool_choice
    if isinstance(choice, str):
        return [] if choice == "required" else None
    kind = choice.get("type")
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        tools = (allowed.get("tools") or []) if isinstance(allowed, Mapping) else None
        if not isinstance(tools, list):
            raise BadRequest("tool_choice.allowed_tools must list tools", param="tool_choice")
        listed = [_name(tool) for tool in tools]
        return listed if allowed.get("mode") == "required" else None
    if kind in ("auto", "none"):
        return None
    return [] if kind in ("any", "required") else [_name(choice)]


def _name(choice: Any) -> str:
    name = function_of(choice).get("name")
    if not isinstance(name, str):
        raise BadRequest(
            "tool_choice must be none, auto, required or "
            "{'type': 'function', 'function': {'name': ...}}",
            param="tool_choice",
        )
    return name


def _answer(
    request: GenerateRequest, compiles: Compiles, preface: str, spaces: Whitespace
) -> Form | None:
    if request.grammar is not None:
        if _kind(request.response_format) not in (None, "text"):
            raise BadRequest("send either grammar or response_format", param="grammar")
        return _free_grammar(request.grammar, compiles, preface)
    schema = response_schema(request.response_format)
    if schema is None:
        return None
    where = "response_format"
    read = SchemaReader(where).read(schema)
    document: dict[str, Any] = {"anyOf": []} if read is False else {} if read is True else read
    lark = f"start: answer\nanswer: {preface} json\njson: {json_rule(document, spaces)}"
    wrong = compiles(lark)
    if wrong:
        raise BadRequest(f"{where}: the schema cannot be enforced: {wrong}", param=where)
    return Form(lark, after_lead=True, begins_json=not preface)


def _kind(response_format: Mapping[str, Any] | None) -> Any:
    return None if response_format is None else response_format.get("type")


def response_schema(response_format: Mapping[str, Any] | None) -> Any:
    """`None`: plain text. Raises `BadRequest`."""
    if response_format is None or not response_format:
        return None
    kind = _kind(response_format)
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise BadRequest(
            f"response_format.type is {kind!r}; it must be text, json_object or json_schema",
            param="response_format",
        )
    if kind == "json_object":
        inside = response_format.get("json_schema") or response_format
        found = inside.get("schema") if isinstance(inside, Mapping) else inside
        if isinstance(found, Mapping | None):
            return {"type": "object", **(found or {})}
        raise BadRequest("response_format.schema must be a JSON schema", param="response_format")
    inner = response_format.get("json_schema") or response_format
    for key in ("schema", "schema_"):
        if isinstance(inner, Mapping) and isinstance(inner.get(key), (Mapping, bool)):
            return inner[key]
    raise BadRequest(
        "response_format.json_schema.schema must be a JSON schema", param="response_format"
    )


def _free_grammar(grammar: Mapping[str, Any], compiles: Compiles, preface: str) -> Form:
    kind, value = grammar.get("type"), grammar.get("value")
    if kind not in ("regex", "lark") or not isinstance(value, str) or not value:
        raise BadRequest(
            "grammar must be {'type': 'regex' or 'lark', 'value': text}", param="grammar"
        )
    if len(value) > MAX_GRAMMAR:
        raise BadRequest(f"grammar is longer than {MAX_GRAMMAR} characters", param="grammar")
    lark = value if kind == "lark" else f"start: {preface} /{between_slashes(value)}/"
    wrong = compiles(lark)
    if wrong:
        raise BadRequest(f"grammar is not valid: {wrong}", param="grammar")
    return Form(lark)
