"""Grammars for tool calls, in llguidance's dialect of Lark. A format writes arguments as one JSON
object, or each value between tags, where text has no JSON quotes:

    <call>search {"text": "tea", "limit": 3}</call>
    <call>search <arg=text>tea</arg> <arg=limit>3</arg></call>
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import wrong_part
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
from .schema import Function, SchemaReader, Split, Whitespace, json_rule, literal, quote
from .trial import MAX_GRAMMAR

MAX_CALLS = 16  # without a limit, a model could call for ever
_PLACES = {"{digits}": "/[0-9]{1,3}/", "{id}": f"/[A-Za-z0-9]{{{SHORT_ID}}}/"}
"""Lark for the placeholders in `CallGrammar.before` and `after`."""


def tool_functions(
    tools: Sequence[Mapping[str, Any]],
    problem_of: Callable[[Any], str],
    names: Sequence[str] | None,
    warnings: list[str],
) -> list[Function]:
    """The functions in `names` (`None`: all). `problem_of`: why a schema does not compile, or
    empty. The schema of a strict tool is kept whole. From those of others, what cannot be enforced
    is left out, with a line in `warnings`. Raises `BadRequest` for a wrong tool, for a strict
    schema that cannot be enforced, and for a name that no tool has."""
    by_name: dict[str, Function] = {}
    for i, tool in enumerate(tools):
        function = function_of(tool)
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise wrong_part(f"tools[{i}]", "must hold a function with a name")
        if names is None or name in names:
            schema = _read_parameters(function, i, problem_of, warnings)
            by_name[name] = Function(name, schema, function.get("strict") is True)
    unknown = [name for name in names or () if name not in by_name]
    if unknown or not by_name:
        called = f"the tool {unknown[0]!r}" if unknown else "a tool"
        raise wrong_part("tool_choice", f"demands {called}, which is not among tools")
    return list(by_name.values())


def _read_parameters(
    function: Mapping[str, Any], i: int, problem_of: Callable[[Any], str], warnings: list[str]
) -> dict[str, Any]:
    strict = function.get("strict") is True
    reader = SchemaReader(f"tools[{i}].function.parameters", lenient=not strict)
    schema = reader.read(function.get("parameters") or {"properties": {}})
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise wrong_part(reader.where, "must be a schema of type object")
    # A tool that lists its parameters accepts no others, unless its schema allows them.
    closed = {"additionalProperties": False} if "properties" in schema else {}
    schema = {"type": "object", **closed, **schema}
    wrong = problem_of(schema)
    if wrong and strict:
        raise wrong_part(reader.where, wrong, ":")
    warnings += reader.warnings
    if wrong:
        warnings.append(f"{reader.where}: not enforced ({wrong})")
        return {"type": "object"}
    return schema


@dataclass
class CallRules:
    """Writes the rules by which only these functions can be called. `lark`: the rule `calls`, and
    those that it refers to. `parallel`: several calls are allowed. `warnings`: what the rules do
    not enforce. Raises `BadRequest` if they are too long."""

    grammar: CallGrammar
    functions: Sequence[Function]
    split: Split  # cuts text at special tokens, which become their ids
    spaces: Whitespace
    parallel: bool
    warnings: list[str] = field(init=False, default_factory=list)
    _rules: list[str] = field(init=False, default_factory=list)
    _size: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        grammar, names = self.grammar, [f"call_{i}" for i in range(len(self.functions))]
        opened, closed = self._literal(grammar.open), self._literal(grammar.close)
        self._max_calls = MAX_CALLS if self.parallel else 1
        tail = ""
        if self.parallel and grammar.between is not None:
            tail = f"({self._literal(grammar.between)} call){{0,{MAX_CALLS - 1}}}"
        self._rules += [f"calls: {opened} call {tail} {closed}", f"call: {' | '.join(names)}"]
        for i, function in enumerate(self.functions):
            before = self._literal(grammar.before, grammar.name_text(function.name))
            after = self._literal(grammar.after)
            self._rules.append(f"call_{i}: {before} {self._arguments(i, function)} {after}")
        self.lark = "\n".join(self._rules)

    def json_schema(self) -> dict[str, Any] | None:
        """A schema of the calls if the format writes them as plain JSON, without markers."""
        grammar, calls, parameters = self.grammar, [], {}
        if grammar.before[:1] != "{" or grammar.open + grammar.close not in ("", "[]"):
            return None
        for i, function in enumerate(self.functions):
            root, name = f"#/$defs/{i}", grammar.name_text(function.name)
            try:  # the 0 stands for the arguments
                call = json.loads(f"{grammar.before}0{grammar.after}".replace("{name}", name))
            except ValueError:
                return None
            parameters[str(i)] = SchemaReader("tools", root=root).read(function.schema)
            fields = {k: {"$ref": root} if v == 0 else {"const": v} for k, v in call.items()}
            closed = {"required": [*fields], "additionalProperties": False}
            calls.append({"type": "object", "properties": fields, **closed})
        schema: dict[str, Any] = {"anyOf": calls}
        if grammar.open:
            length = {"minItems": 1, "maxItems": self._max_calls}
            schema = {"type": "array", "items": schema, **length}
        return {**schema, "$defs": parameters}

    def _literal(self, text: str, name: str = "") -> str:
        """Lark of a text of the format, with the tool's name and rules for its placeholders."""
        pieces = re.split(r"(\{digits\}|\{id\})", text)
        texts = [_PLACES.get(p) or literal(p.replace("{name}", name), self.split) for p in pieces]
        return " ".join(texts)

    def _arguments(self, i: int, function: Function) -> str:
        """A Lark expression of a call's arguments. Adds the rules to which it refers."""
        tags = self.grammar.tagged
        properties, required = listed_parameters(function.schema)
        if tags is None or not tags.takes_keys(properties):
            self._rules.append(f"args_{i}: {json_rule(function.schema, self.spaces)}")
            return f"args_{i}"
        needs: dict[str, bool] = {}  # whether an argument is required, by its rule
        more = (self.split, self.spaces, self.warnings)
        for k, (name, schema) in enumerate(properties.items()):
            rule = f"arg_{i}_{k}"
            self._add(TaggedArgument(rule, name, schema, function, tags, *more).rules())
            needs[rule] = name in required
        if not tags.between:
            return " ".join(rule + ("" if needed else "?") for rule, needed in needs.items())
        return self._separate(f"args_{i}", needs, self._literal(tags.between))

    def _add(self, rules: list[str]) -> None:
        """Add rules up to the length that can be compiled: each may repeat the whole schema."""
        self._rules += rules
        self._size += sum(map(len, rules))
        if self._size > MAX_GRAMMAR:
            length = f"their grammar is longer than {MAX_GRAMMAR} characters"
            raise wrong_part("tools", f"cannot be enforced: {length}")

    def _separate(self, rule: str, needs: Mapping[str, bool], between: str) -> str:
        """Add rules for arguments with a text between each two. Returns the name of the first rule.
        A rule `_more` follows an argument, so it begins with that text. For `a`, an optional `b`:

            rule_0: a rule_1_more                 rule_0_more: "," a rule_1_more
            rule_1: b "" | ""                     rule_1_more: "," b "" | ""
        """
        rest, more = '""', '""'
        for k, (argument, needed) in reversed(list(enumerate(needs.items()))):
            first, next_one = f"{argument} {more}", f"{between} {argument} {more}"
            if not needed:
                first, next_one = f"{first} | {rest}", f"{next_one} | {more}"
            self._rules += [f"{rule}_{k}: {first}", f"{rule}_{k}_more: {next_one}"]
            rest, more = f"{rule}_{k}", f"{rule}_{k}_more"
        return rest


@dataclass(frozen=True)
class TaggedArgument:
    """One parameter with a value between tags. `rule`: the name of its rule."""

    rule: str
    name: str
    schema: Any
    function: Function
    tags: TaggedArguments
    split: Split
    spaces: Whitespace
    warnings: list[str]  # `rules` adds to it

    def rules(self) -> list[str]:
        """The Lark rule with the name `rule`, and those that it refers to."""
        rule, root = self.rule, self.function.schema
        value = resolve(self.schema, root)
        if self.tags.quotes is None:  # text is a JSON string, too
            return self._json(rule)
        listed = listed_values(value, root) or []
        if any(isinstance(one, str) for one in listed):
            return [f"{rule}: {self._list_values(listed)}"]
        if not self.tags.may_be_text(value, root):
            return self._json(rule)
        if not self.tags.marks_text or value_types(value, root) == {"string"}:
            return self._text(rule, value)
        # the marks show whether a value is text
        either = [f"{rule}: {rule}_t | {rule}_j"]
        return either + self._text(f"{rule}_t", value) + self._json(f"{rule}_j")

    def _json(self, rule: str) -> list[str]:
        moved = SchemaReader("tools", root="#/$defs/root")
        value = moved.read(self.schema)
        document = value if isinstance(value, dict) else {} if value else {"anyOf": []}
        for kind in implied_type(document):  # one at most
            document = {**document, "type": kind}
        document = {**document, "$defs": {"root": moved.read(self.function.schema)}}
        return [
            f"{rule}: {self._key()} {rule}_json {literal(self._after, self.split)}",
            f"{rule}_json: {json_rule(document, self.spaces)}",
        ]

    def _key(self, *, text: bool = False) -> str:
        after = (text and self.tags.text_key_after) or self.tags.key_after
        return literal(f"{self.tags.key_before}{self.name}{after}", self.split)

    @property
    def _after(self) -> str:
        return self.tags.value_after.replace("{key}", self.name)

    def _list_values(self, values: list[Any]) -> str:
        """Lark of a key and one of these values. A text has its own form of key and quotes."""
        texts = [value for value in values if isinstance(value, str)]
        others = [json.dumps(value) for value in values if not isinstance(value, str)]
        forms = []
        if texts:
            before, after = (literal(mark, self.split) for mark in self.tags.quotes or ("", ""))
            forms.append(f"{self._key(text=True)} {before} {_one_of(texts)} {after}")
        if others:
            forms.append(f"{self._key()} {_one_of(others)}")
        return f"({' | '.join(forms)}) {literal(self._after, self.split)}"

    def _text(self, rule: str, value: Mapping[str, Any]) -> list[str]:
        before, quote_after = self.tags.quotes or ("", "")
        closing = quote_after + self._after
        head = f"{rule}: {self._key(text=True)} {literal(before, self.split)}"
        terminal = f"{rule}_TEXT".upper()
        text = f"{terminal}: {self._text_regex(value)}{self._exclude(closing.strip())}"
        first, *rest = self.split(closing)
        if isinstance(first, int):
            return [text, f"{head} {terminal} {literal(closing, self.split)}"]
        # Lazy: the text ends at the first closing tag.
        lazy = f"{rule}_text[suffix={quote(first)}]: {terminal}"
        beyond = literal(closing[len(first) :], self.split) if rest else ""
        return [text, lazy, f"{head} {rule}_text {beyond}"]

    def _exclude(self, closing: str) -> str:
        """The end of a terminal: its text must not contain the closing mark or a barred text."""
        barred = "|".join(map(plain_pattern, filter(None, (closing, *self.tags.barred))))
        return f" & ~/(?s:.*)({barred})(?s:.*)/" if barred else ""

    def _text_regex(self, schema: Mapping[str, Any]) -> str:
        length = f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/"
        pattern = schema.get("pattern")
        whole = self.function.text_regex or (None if pattern is None else whole_text(pattern))
        for keyword in ("pattern", "format") if self.function.strict else ():
            if keyword in schema and (keyword == "format" or whole is None):
                where = f"tool {self.function.name!r}, parameter {self.name!r}"
                what = f"the {keyword} {schema[keyword]!r}"
                self.warnings.append(f"{where}: {what} is not enforced in this model's call format")
        return length if whole is None else f"/{whole}/ & {length}"


def _one_of(texts: Sequence[str]) -> str:
    """One regular expression, because llguidance allows only 2,000 alternatives in a rule."""
    return f"/({'|'.join(map(plain_pattern, texts))})/"
