"""The fault of a reply: one word for a table, and a sentence with the details."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import jsonschema  # type: ignore[import-untyped]

from .asking import Made, Reply
from .matching import differences, is_invented
from .scenario import Call, Expected, Text, Tool

MAX_UNORDERED_CALLS = 6
"""Calls that are tried in every order."""

FAULTS = (
    "request failed",
    "cut off",
    "no call",
    "call in text",
    "needless call",
    "missing call",
    "extra call",
    "unknown tool",
    "wrong tool",
    "no JSON",
    "against the schema",
    "invented argument",
    "wrong argument",
    "no text",
    "wrong text",
    "differs by stream",
)
"""In the order in which one is looked for."""


LEAST_WRONG = ("invented argument", "wrong argument", "wrong tool")
"""Of several calls the order that comes closest to what was wanted is the one to speak of."""


@dataclass(frozen=True)
class Fault:
    name: str
    """One of `FAULTS`."""
    reason: str


def judged(reply: Reply, expected: Expected, tools: Mapping[str, Tool]) -> Fault | None:
    """The first fault of a reply; `None`: it is right."""
    if reply.failure:
        return Fault("request failed", reply.failure)
    if reply.finish == "length":
        return Fault("cut off", f"after {reply.tokens} tokens")
    if expected.text is not None:
        return _text_fault(reply, expected.text)
    if not reply.calls:
        return _no_call(reply, expected.calls)
    return _calls_fault(reply.calls, expected.calls, tools)


def _text_fault(reply: Reply, wanted: Text) -> Fault | None:
    if reply.calls:
        return Fault("needless call", "; ".join(map(_shown, reply.calls)))
    if not reply.text.strip():
        return Fault("no text", "the reply is empty")
    said = reply.text.casefold()
    for each in wanted.has:
        options = each if isinstance(each, list) else [each]
        if not any(option.casefold() in said for option in options):
            return Fault("wrong text", f"it does not hold {' or '.join(map(repr, options))}")
    held = [each for each in wanted.lacks if each.casefold() in said]
    return Fault("wrong text", f"it holds {held[0]!r}") if held else None


def _no_call(reply: Reply, wanted: Sequence[Call]) -> Fault:
    names = [name for call in wanted for name in call]
    if not reply.text.strip():
        return Fault("no text", f"the reply is empty; wanted a call of {names[0]}")
    found = next((name for name in names if name in reply.text), None)
    if found is not None:
        return Fault("call in text", f"{found} stands in the text, and no call was read")
    return Fault("no call", f"wanted a call of {names[0]}")


def _calls_fault(
    made: Sequence[Made], wanted: Sequence[Call], tools: Mapping[str, Tool]
) -> Fault | None:
    for call in made:
        if fault := _call_fault(call, tools):
            return fault
    if len(made) != len(wanted):
        name = "missing call" if len(made) < len(wanted) else "extra call"
        return Fault(name, f"{len(made)} of {len(wanted)}: {'; '.join(map(_shown, made))}")
    if len(wanted) > MAX_UNORDERED_CALLS:
        return _paired(made, wanted)
    faults = []
    for order in permutations(wanted):
        fault = _paired(made, order)
        if fault is None:
            return None
        faults.append(fault)
    return min(faults, key=lambda fault: LEAST_WRONG.index(fault.name))


def _call_fault(call: Made, tools: Mapping[str, Tool]) -> Fault | None:
    """A fault of name or schema, whatever was expected."""
    if call.name not in tools:
        return Fault("unknown tool", f"{call.name!r}; there are {', '.join(tools)}")
    arguments = _arguments(call)
    if arguments is None:
        return Fault("no JSON", _shown(call))
    try:
        jsonschema.validate(arguments, tools[call.name].parameters)
    except jsonschema.ValidationError as error:
        return Fault("against the schema", f"{_shown(call)}: {error.message}")
    return None


def _paired(made: Sequence[Made], wanted: Sequence[Call]) -> Fault | None:
    for call, wish in zip(made, wanted, strict=True):
        ((name, arguments),) = wish.items()
        if call.name != name:
            return Fault("wrong tool", f"{_shown(call)}, not {name}")
        if found := differences(arguments, _arguments(call) or {}):
            invented = all(map(is_invented, found))
            kind = "invented argument" if invented else "wrong argument"
            return Fault(kind, f"{call.name}: {'; '.join(found)}")
    return None


def _arguments(call: Made) -> dict[str, Any] | None:
    try:
        found = json.loads(call.arguments)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _shown(call: Made) -> str:
    return f"{call.name}({call.arguments[:200]})"
