"""The form that a request demands of its reply, as a grammar."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...errors import BadRequest, wrong_part
from ...protocol.requests import GenerateRequest
from ...records.json_reading import function_of, listed_parameters
from ...records.parsing import CallGrammar, MessageGrammar
from .calls import CallRules, tool_functions
from .patterns import between_slashes, text_pattern
from .schema import ONE_LINE, Function, SchemaReader, Split, Whitespace, json_rule, literal
from .trial import MAX_GRAMMAR

ProblemOf = Callable[[str], str]  # why a grammar in Lark does not compile, or empty
BARE_JSON = CallGrammar.json("", "")


@dataclass(frozen=True)
class GrammarForm:
    """A grammar (Lark, rule `start`), and warnings about what it does not enforce."""

    lark: str
    warnings: tuple[str, ...] = ()
    begins_json: bool = False  # it may begin with JSON, before which white space is allowed
    of_client: bool = False  # the client's own: neither white space nor a thought may precede it


def request_form(
    request: GenerateRequest,
    calls: CallGrammar | None,
    split: Split,
    problem_of: ProblemOf,
    preface: str = "",
    spaces: Whitespace = ONE_LINE,
) -> GrammarForm | None:
    """The form that the request demands; `None`: any text is allowed. `calls`: the tool parser's
    call format; `None`: bare JSON objects. `preface`: what the model's format writes before an
    answer. Raises `BadRequest` that names the parameter, and for schemas the keyword."""
    names = demanded_names(request)
    before = literal(preface, split)
    answer = _json_answer(request, problem_of, before, spaces)
    given = request.grammar
    own = None if given is None else _client_grammar(given, problem_of, before)
    may_call = bool(request.tools) and calls is not None and request.tool_choice != "none"
    if names is not None:
        start, answer = "start: calls", None
    elif own:
        return GrammarForm(own, of_client=True)
    elif answer and may_call:
        start = f"start: answer | calls\n{answer}"
    elif answer:
        return GrammarForm(f"start: answer\n{answer}", begins_json=not preface)
    elif may_call and request.tool_grammars and not preface and _begins_special(calls, split):
        start = "start: FREE? calls?\nFREE: /(?s:.+)/"
    else:
        return None
    warnings: list[str] = []
    functions = tool_functions(
        request.tools,
        lambda schema: problem_of(f"start: {json_rule(schema, spaces)}"),
        names or None,
        warnings,
    )
    functions = [_restrict_text(function, request, problem_of) for function in functions]
    parallel = request.parallel_tool_calls and not (names and len(names) == 1)
    rules = CallRules(calls or BARE_JSON, functions, split, spaces, parallel)
    lark = rules.lark
    if answer and (schema := rules.json_schema()):
        # Calls get a JSON rule like the answer: of two lexemes that begin alike (`{` of an answer,
        # `{"name": "` of a call), the lexer would read only the longer one.
        lark = f"calls: {json_rule(schema, spaces)}"
    lark = f"{start}\n{lark}"
    if problem := problem_of(lark):
        raise wrong_part("tools", f"cannot be enforced: {problem}")
    begins_json = bool(answer) and not preface
    return GrammarForm(lark, (*warnings, *rules.warnings), begins_json)


def after_message(form: GrammarForm, messages: MessageGrammar, split: Split) -> GrammarForm:
    """The form with an optional thought before it, for formats that address every message.
    Unchanged unless a thought ends with one special token, which no text contains."""
    opened, ended = literal(messages.thought, split), split(messages.thought_end)
    if len(ended) != 1 or isinstance(ended[0], str):
        return form
    closed = literal(messages.thought_end + messages.next, split)
    lark = form.lark.replace("start:", "start: thought? message\nmessage:", 1)
    return replace(form, lark=f"{lark}\nthought: {opened} THOUGHT {closed}\nTHOUGHT: /(?s:.*)/")


def _begins_special(calls: CallGrammar | None, split: Split) -> bool:
    """Whether calls begin with a special token: only such a token can end a free text."""
    begin = "" if calls is None else calls.open + calls.before
    return isinstance(next(iter(split(begin)), ""), int)


def _restrict_text(function: Function, request: GenerateRequest, problem_of: ProblemOf) -> Function:
    """The function with the tool's grammar, if it has one, for its first parameter."""
    grammar = request.tool_grammars.get(function.name)
    if not isinstance(grammar, Mapping):
        return function
    try:
        lark = _client_grammar(grammar, problem_of)
    except BadRequest as error:
        named = [function_of(tool).get("name") for tool in request.tools]
        where = f"tools[{named.index(function.name)}].function"
        raise BadRequest(f"{where}.format: {error.message}", param=where) from None
    try:
        text = text_pattern(lark)
    except ValueError as unsupported:
        problem = f"cannot be enforced: {unsupported} is not supported"
        message = f"the format of the tool {function.name!r} {problem}"
        raise BadRequest(message, param="tools") from None
    name = next(iter(listed_parameters(function.schema)[0]), None)
    if name is None:
        raise wrong_part("tools", f"a format needs one text parameter: {function.name!r}", ":")
    value = {"type": "string", "pattern": f"^{text}$"}
    properties = {**function.schema.get("properties", {}), name: value}
    schema = {**function.schema, "properties": properties}
    return replace(function, text_regex=text, schema=schema)


def demanded_names(request: GenerateRequest) -> list[str] | None:
    """Names of tools, one of which must be called; empty: any tool. `None`: no call is demanded, as
    for `allowed_tools` with the mode `auto`, which has no effect. Raises `BadRequest`."""
    choice = request.tool_choice
    if isinstance(choice, str):
        return [] if choice == "required" else None
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        tools = (allowed.get("tools") or []) if isinstance(allowed, Mapping) else None
        if not isinstance(tools, list):
            raise wrong_part("tool_choice", "must list tools", ".allowed_tools")
        listed = [_name(tool) for tool in tools]
        return listed if allowed.get("mode") == "required" else None
    return [_name(choice)]


def _name(choice: Any) -> str:
    name = function_of(choice).get("name")
    if not isinstance(name, str):
        forms = "none, auto, required or {'type': 'function', 'function': {'name': ...}}"
        raise wrong_part("tool_choice", f"must be {forms}")
    return name


def _json_answer(
    request: GenerateRequest, problem_of: ProblemOf, before: str, spaces: Whitespace
) -> str | None:
    """The rule `answer` and those that it refers to, if the answer has a schema."""
    if request.grammar is not None:
        if (request.response_format or {}).get("type") not in (None, "text"):
            raise BadRequest("send either grammar or response_format", param="grammar")
        return None
    schema = response_schema(request.response_format)
    if schema is None:
        return None
    read = SchemaReader("response_format").read(schema)
    document: dict[str, Any] = {"anyOf": []} if read is False else {} if read is True else read
    rules = f"answer: {before} json\njson: {json_rule(document, spaces)}"
    if problem := problem_of(f"start: answer\n{rules}"):
        raise wrong_part("response_format", f"the schema cannot be enforced: {problem}", ":")
    return rules


def response_schema(response_format: Mapping[str, Any] | None) -> Any:
    """The JSON schema that the answer must fit; `None`: plain text. Raises `BadRequest`."""
    if not response_format or (kind := response_format.get("type")) == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        problem = f"is {kind!r}; it must be text, json_object or json_schema"
        raise wrong_part("response_format", problem, ".type")
    if kind == "json_object":
        inside = response_format.get("json_schema") or response_format
        found = inside.get("schema") if isinstance(inside, Mapping) else inside
        if isinstance(found, Mapping | None):
            return {"type": "object", **(found or {})}
        raise wrong_part("response_format", "must be a JSON schema", ".schema")
    inner = response_format.get("json_schema") or response_format
    for key in ("schema", "schema_"):
        if isinstance(inner, Mapping) and isinstance(inner.get(key), (Mapping, bool)):
            return inner[key]
    raise wrong_part("response_format", "must be a JSON schema", ".json_schema.schema")


def _client_grammar(grammar: Mapping[str, Any], problem_of: ProblemOf, before: str = "") -> str:
    """The client's grammar in Lark. `before`: a Lark expression of what the reply begins with."""
    kind, value = grammar.get("type"), grammar.get("value")
    if kind not in ("regex", "lark") or not isinstance(value, str) or not value:
        raise wrong_part("grammar", "must be {'type': 'regex' or 'lark', 'value': text}")
    if len(value) > MAX_GRAMMAR:
        raise wrong_part("grammar", f"is longer than {MAX_GRAMMAR} characters")
    lark = value if kind == "lark" else f"start: /{between_slashes(value)}/"
    if problem := problem_of(lark):
        raise wrong_part("grammar", f"is not valid: {problem}")
    return f"start: {before} %lark {{\n{lark}\n}}" if before else lark
