"""Grammars for tool calls, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import keyword
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import BadRequest
from ...families.tokenizer.template_fit import SHORT_ID
from ...records.json_reading import function_of, listed_parameters
from ...records.parsing import CallGrammar, TaggedArguments
from .schema import (
    ONE_LINE,
    Function,
    SchemaReader,
    Spaces,
    Split,
    json_rule,
    literal,
)
from .tagged import TaggedArgument
from .trial import MAX_GRAMMAR

MAX_CALLS = 16
"""Without a limit, a model could call for ever."""
_NUMBER = " /[0-9]{1,3}/ "
_ID = f" /[A-Za-z0-9]{{{SHORT_ID}}}/ "


def tool_functions(
    tools: Sequence[Mapping[str, Any]],
    compiles: Callable[[Any], str],
    names: Sequence[str] | None = None,
    warnings: list[str] | None = None,
) -> list[Function]:
    """`compiles` maps a schema to its problem, or to an empty string. Parameters of a strict tool
    are enforced exactly or refused with `BadRequest`; others as far as possible."""
    by_name: dict[str, Function] = {}
    noted = warnings if warnings is not None else []
    for i, tool in enumerate(tools):
        function = function_of(tool)
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise BadRequest(f"tools[{i}] must hold a function with a name", param=f"tools[{i}]")
        if names is None or name in names:
            schema = _parameters(function, i, compiles, noted)
            by_name[name] = Function(name, schema, function.get("strict") is True)
    unknown = [name for name in names or () if name not in by_name]
    if unknown or not by_name:
        called = f"the tool {unknown[0]!r}" if unknown else "a tool"
        raise BadRequest(
            f"tool_choice demands {called}, which is not among tools", param="tool_choice"
        )
    return list(by_name.values())


def _parameters(
    function: Mapping[str, Any], i: int, compiles: Callable[[Any], str], warnings: list[str]
) -> dict[str, Any]:
    strict = function.get("strict") is True
    reader = SchemaReader(f"tools[{i}].function.parameters", lenient=not strict)
    schema = reader.read(function.get("parameters") or {"properties": {}})
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise BadRequest(f"{reader.where} must be a schema of type object", param=reader.where)
    # A tool that lists its parameters accepts no others, unless its schema allows them.
    closed = {"additionalProperties": False} if "properties" in schema else {}
    schema = {"type": "object", **closed, **schema}
    wrong = compiles(schema)
    if wrong and strict:
        raise BadRequest(f"{reader.where}: {wrong}", param=reader.where)
    warnings += reader.warnings
    if wrong:
        warnings.append(f"{reader.where}: not enforced ({wrong})")
        return {"type": "object"}
    return schema


@dataclass
class CallRules:
    grammar: CallGrammar
    functions: Sequence[Function]
    split: Split
    parallel: bool = True
    spaces: Spaces = field(default_factory=lambda: ONE_LINE)
    rules: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    _size: int = 0

    def lark(self) -> str:
        grammar = self.grammar
        more = MAX_CALLS - 1 if self.parallel and grammar.between is not None else 0
        between = literal(grammar.between or "", self.split)
        tail = f" ({between} call){{0,{more}}}" if more else ""
        opened, closed = literal(grammar.open, self.split), literal(grammar.close, self.split)
        self.rules = [f"calls: {opened} call{tail} {closed}"]
        self.rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(self.functions))))
        for i, function in enumerate(self.functions):
            before, after = self._before(function.name), self._with_ids(grammar.after, self._text)
            self.rules.append(f"call_{i}: {before} {self._arguments(i, function)} {after}")
        return "\n".join(self.rules)

    def _before(self, name: str) -> str:
        shown = shown_name(self.grammar, name)

        def numbered(text: str) -> str:
            pieces = text.split("{digits}")
            return _NUMBER.join(self._text(piece.replace("{name}", shown)) for piece in pieces)

        return self._with_ids(self.grammar.before, numbered)

    def _with_ids(self, text: str, rule: Callable[[str], str]) -> str:
        return _ID.join(map(rule, text.split("{id}")))

    def _text(self, text: str) -> str:
        return literal(text, self.split)

    def _arguments(self, i: int, function: Function) -> str:
        tags = self.grammar.tagged
        properties, required = listed_parameters(function.schema)
        if tags is None or written_as_object(tags, properties):
            self.rules.append(f"args_{i}: {json_rule(function.schema, self.spaces)}")
            return f"args_{i}"
        names = {}
        for k, (name, schema) in enumerate(properties.items()):
            argument = TaggedArgument(f"arg_{i}_{k}", name, schema, function, tags, self.spaces)
            self._add(argument.rules(self.split))
            self.warnings += argument.warnings
            names[argument.rule] = name in required
        if not tags.between:
            return " ".join(rule + ("" if needed else "?") for rule, needed in names.items())
        return self._separated(f"args_{i}", names, literal(tags.between, self.split))

    def _add(self, rules: list[str]) -> None:
        """Add rules while they can be compiled: each may repeat the whole schema."""
        self.rules += rules
        self._size += sum(map(len, rules))
        if self._size > MAX_GRAMMAR:
            raise BadRequest(
                f"tools cannot be enforced: their grammar is longer than {MAX_GRAMMAR} characters",
                param="tools",
            )

    def _separated(self, rule: str, names: Mapping[str, bool], between: str) -> str:
        rest, more = '""', '""'
        for k, (name, needed) in reversed(list(enumerate(names.items()))):
            first, next_one = f"{name} {more}", f"{between} {name} {more}"
            if not needed:
                first, next_one = f"{first} | {rest}", f"{next_one} | {more}"
            self.rules += [f"{rule}_{k}: {first}", f"{rule}_{k}_more: {next_one}"]
            rest, more = f"{rule}_{k}", f"{rule}_{k}_more"
        return rest


def shown_name(grammar: CallGrammar, name: str) -> str:
    """In quotes it is a JSON string."""
    quoted = '"{name}"' in grammar.before
    return json.dumps(name, ensure_ascii=False)[1:-1] if quoted else name


def written_as_object(tags: TaggedArguments, parameters: Iterable[str]) -> bool:
    """Whether calls with these parameters are written as one JSON object although the format has
    tags."""
    return tags.keywords and not all(
        name.isidentifier() and name.isascii() and not keyword.iskeyword(name)
        for name in parameters
    )


def called_object(function: Function, key: str) -> dict[str, Any]:
    parameters = SchemaReader("tools", root=f"#/properties/{key}").read(function.schema)
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, key: parameters},
        "required": ["name", key],
        "additionalProperties": False,
    }
