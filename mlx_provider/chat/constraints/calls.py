"""Grammars for tool calls, in llguidance's dialect of Lark; formats that write each value between
tags have a rule for each schema."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import BadRequest
from ...records.json_reading import (
    function_of,
    implied_type,
    listed_parameters,
    listed_values,
    resolve,
    value_types,
)
from ...records.parsing import SHORT_ID, CallGrammar, TaggedArguments
from .patterns import plain_pattern, whole_text
from .schema import ONE_LINE, Function, SchemaReader, Split, Whitespace, json_rule, literal
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
    spaces: Whitespace = field(default_factory=lambda: ONE_LINE)
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

    def json_schema(self) -> dict[str, Any] | None:
        """Of calls that are JSON without markers. `None`: others."""
        grammar, calls, parameters = self.grammar, [], {}
        if grammar.before[:1] != "{" or grammar.open + grammar.close not in ("", "[]"):
            return None
        for i, function in enumerate(self.functions):
            root, name = f"#/$defs/{i}", grammar.name_text(function.name)
            try:
                call = json.loads(f"{grammar.before}0{grammar.after}".replace("{name}", name))
            except ValueError:
                return None
            parameters[str(i)] = SchemaReader("tools", root=root).read(function.schema)
            named = {k: {"$ref": root} if v == 0 else {"const": v} for k, v in call.items()}
            closed = {"required": [*named], "additionalProperties": False}
            calls.append({"type": "object", "properties": named, **closed})
        schema: dict[str, Any] = {"anyOf": calls}
        if grammar.open:
            most = MAX_CALLS if self.parallel else 1
            schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": most}
        return {**schema, "$defs": parameters}

    def _before(self, name: str) -> str:
        shown = self.grammar.name_text(name)

        def with_numbers(text: str) -> str:
            pieces = text.split("{digits}")
            return _NUMBER.join(self._text(piece.replace("{name}", shown)) for piece in pieces)

        return self._with_ids(self.grammar.before, with_numbers)

    def _with_ids(self, text: str, rule: Callable[[str], str]) -> str:
        return _ID.join(map(rule, text.split("{id}")))

    def _text(self, text: str) -> str:
        return literal(text, self.split)

    def _arguments(self, i: int, function: Function) -> str:
        tags = self.grammar.tagged
        properties, required = listed_parameters(function.schema)
        if tags is None or not tags.takes_keys(properties):
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
        return self._separate(f"args_{i}", names, literal(tags.between, self.split))

    def _add(self, rules: list[str]) -> None:
        """Add rules while they can be compiled: each may repeat the whole schema."""
        self.rules += rules
        self._size += sum(map(len, rules))
        if self._size > MAX_GRAMMAR:
            raise BadRequest(
                f"tools cannot be enforced: their grammar is longer than {MAX_GRAMMAR} characters",
                param="tools",
            )

    def _separate(self, rule: str, names: Mapping[str, bool], between: str) -> str:
        rest, more = '""', '""'
        for k, (name, needed) in reversed(list(enumerate(names.items()))):
            first, next_one = f"{name} {more}", f"{between} {name} {more}"
            if not needed:
                first, next_one = f"{first} | {rest}", f"{next_one} | {more}"
            self.rules += [f"{rule}_{k}: {first}", f"{rule}_{k}_more: {next_one}"]
            rest, more = f"{rule}_{k}", f"{rule}_{k}_more"
        return rest


@dataclass
class TaggedArgument:
    rule: str
    name: str
    schema: Any
    function: Function
    tags: TaggedArguments
    spaces: Whitespace = field(default_factory=lambda: ONE_LINE)
    warnings: list[str] = field(default_factory=list)

    def rules(self, split: Split) -> list[str]:
        value = resolve(self.schema, self.function.schema)
        if self.tags.quotes is not None:
            listed = listed_values(value, self.function.schema) or []
            if any(isinstance(one, str) for one in listed):
                return [f"{self.rule}: {self._list_values(listed, split)}"]
        rule, root = self.rule, self.function.schema
        if not self.tags.may_be_text(value, root):
            return self._json(rule, split)
        if not self.tags.marks_text or value_types(value, root) == {"string"}:
            return self._text(rule, value, split)
        either = [f"{rule}: {rule}_t | {rule}_j"]
        return either + self._text(f"{rule}_t", value, split) + self._json(f"{rule}_j", split)

    def _json(self, rule: str, split: Split) -> list[str]:
        return [
            f"{rule}: {self._key(split)} {rule}_json {self._after(split)}",
            f"{rule}_json: {json_rule(self._document(), self.spaces)}",
        ]

    def _key(self, split: Split, *, text: bool = False) -> str:
        tags = self.tags
        after = (text and tags.text_key_after) or tags.key_after
        return literal(f"{tags.key_before}{self.name}{after}", split)

    def _after(self, split: Split) -> str:
        return literal(self.tags.value_after.replace("{key}", self.name), split)

    def _list_values(self, values: list[Any], split: Split) -> str:
        """A key and one of its values. Strings have their own rule if the format requires it."""
        around = self.tags.quotes or ("", "")
        texts = [value for value in values if isinstance(value, str)]
        others = [json.dumps(value) for value in values if not isinstance(value, str)]
        forms = []
        if texts:
            before, after = (literal(mark, split) for mark in around)
            words = " | ".join(json.dumps(word, ensure_ascii=False) for word in texts)
            forms.append(f"{self._key(split, text=True)} {before} ({words}) {after}")
        if others:
            forms.append(f"{self._key(split)} ({' | '.join(map(json.dumps, others))})")
        return f"({' | '.join(forms)}) {self._after(split)}"

    def _text(self, rule: str, value: Mapping[str, Any], split: Split) -> list[str]:
        before, quote = self.tags.quotes or ("", "")
        closing = quote + self.tags.value_after.replace("{key}", self.name)
        head = f"{rule}: {self._key(split, text=True)} {literal(before, split)}"
        terminal = f"{rule}_TEXT".upper()
        text = f"{terminal}: {self._text_pattern(value)}{self.without(closing.strip())}"
        first, *rest = split(closing)
        if isinstance(first, int):
            return [text, f"{head} {terminal} {literal(closing, split)}"]
        # Lazy: the text ends at the first closing tag.
        suffix = json.dumps(first, ensure_ascii=False)
        beyond = literal(closing[len(first) :], split) if rest else ""
        return [text, f"{rule}_text[suffix={suffix}]: {terminal}", f"{head} {rule}_text {beyond}"]

    def without(self, closing: str) -> str:
        barred = "|".join(map(plain_pattern, filter(None, (closing, *self.tags.barred))))
        return f" & ~/(?s:.*)({barred})(?s:.*)/" if barred else ""

    def _document(self) -> dict[str, Any]:
        moved = SchemaReader("tools", root="#/$defs/root")
        value = moved.read(self.schema)
        document = value if isinstance(value, dict) else {} if value else {"anyOf": []}
        for kind in implied_type(document):  # one at most
            document = {**document, "type": kind}
        return {**document, "$defs": {"root": moved.read(self.function.schema)}}

    def _text_pattern(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        length = f"/(?s:.{{{least},{'' if most is None else most}}})/"
        pattern = schema.get("pattern")
        whole = self.function.text or (None if pattern is None else whole_text(pattern))
        if pattern is not None and whole is None:
            self._note(f"pattern {pattern!r}")
        if "format" in schema:
            self._note(f"format {schema['format']!r}")
        return length if whole is None else f"/{whole}/ & {length}"

    def _note(self, what: str) -> None:
        if self.function.strict:
            where = f"tool {self.function.name!r}, parameter {self.name!r}"
            self.warnings.append(f"{where}: the {what} is not enforced in this model's call format")
