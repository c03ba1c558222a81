"""Calls in the form that their grammar allows, and the check that the format's own parser reads
what a grammar would force."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import BadRequest
from ...families.tokenizer.template_fit import short_id
from ...protocol.requests import GenerateRequest
from ...records import ToolParser
from ...records.json_reading import function_of, listed_parameters, resolved
from ...records.parsing import CallGrammar, TaggedArguments
from ..output.whole_reply import WholeReply, read_chunks
from .calls import shown_name, written_as_object
from .request import demanded


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
    shown = [short_id(each) for each in ids or map(str, range(len(calls)))]
    texts = []
    for number, (name, arguments, schema) in enumerate(calls):
        before, after = framed(grammar, number, shown[number], name)
        texts.append(before + _body(grammar, arguments, schema) + after)
    if grammar.between is None:
        return "\n".join(f"{grammar.open}{text}{grammar.close}" for text in texts)
    return grammar.open + grammar.between.join(texts) + grammar.close


def framed(grammar: CallGrammar, number: int, call_id: str, name: str) -> tuple[str, str]:
    before = grammar.before.replace("{digits}", str(number)).replace("{id}", call_id)
    after = grammar.after.replace("{id}", call_id)
    return before.replace("{name}", shown_name(grammar, name)), after


def _body(grammar: CallGrammar, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    tags, known = grammar.tagged, listed_parameters(schema)[0]
    if tags is None or written_as_object(tags, known):
        return json.dumps(arguments, ensure_ascii=False)
    return tags.between.join(
        _argument(tags, key, value, resolved(known.get(key), schema), schema)
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
    names = demanded(request)
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
        if [(called, _keys(given)) for called, given in found.calls] != [(name, keys)]:
            raise _unreadable(name, found, parser)


def _unreadable(name: str, found: WholeReply, parser: ToolParser) -> BadRequest:
    lost = "its parameters" if [name] == [called for called, _ in found.calls] else "it"
    return BadRequest(
        f"tool {name!r} cannot be enforced: calls of it are not readable in this model's "
        f"call format ({'; '.join(found.faults) or parser.name}); rename {lost}, or leave "
        "tool_choice at auto",
        param="tools",
    )


def _keys(arguments: str) -> tuple[str, ...]:
    try:
        value = json.loads(arguments)
    except ValueError:
        return ()
    return tuple(value) if isinstance(value, dict) else ()
