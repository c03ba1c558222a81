"""Compares arguments of a call with the wanted ones.

| wanted | the value |
|---|---|
| a number, text, `true`, `null` | is equal; 5 equals 5.0 |
| a list, a mapping | is equal part by part; each part can be a matcher |
| `{$in: [a, b]}` | matches one of these |
| `{$has: text}` | is a text that contains this, in upper or lower case |
| `{$like: text}` | is the same text, apart from case, white space and final punctuation |
| `{$lines: text}` | is the same text, apart from white space at its ends |
| `{$set: [a, b]}` | is a list of these in any order |
| `{$maybe: wanted}` | is missing, or matches this |
| `{$any: true}` | is present |
| `{$python: [names]}` | is Python that compiles, with these functions or classes at the top level |

Python of a model is compiled and never run.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import Any

MAX_SET_ITEMS = 6
"""Items of a `$set`, which are tried in every order."""
_ABSENT = object()


def differences(wanted: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """A description of each wrong argument; empty: all are right."""
    invented = [
        f"{name} was not asked for: {shown(given[name])}" for name in given if name not in wanted
    ]
    found = (_difference(each, given.get(name, _ABSENT), name) for name, each in wanted.items())
    return [*filter(None, found), *invented]


def is_invented(difference: str) -> bool:
    return " was not asked for: " in difference


def _difference(wanted: Any, given: Any, at: str) -> str:
    if given is _ABSENT:
        return "" if _sign(wanted) == "$maybe" else f"{at} is missing"
    return "" if matches(wanted, given) else f"{at} is {shown(given)}, not {shown(wanted)}"


def matches(wanted: Any, given: Any) -> bool:
    """Whether a value matches. `check` tests the matcher itself."""
    if sign := _sign(wanted):
        return MATCHERS[sign](wanted[sign], given)
    if isinstance(wanted, Mapping):
        return isinstance(given, Mapping) and not differences(wanted, given)
    if isinstance(wanted, list):
        return _in_order(wanted, given)
    if isinstance(wanted, bool) or isinstance(given, bool):
        return wanted is given
    return bool(wanted == given)


def check(wanted: Any) -> None:
    """Raises `ValueError` for an unknown matcher at any place."""
    if (sign := _sign(wanted)) and sign not in MATCHERS:
        raise ValueError(f"no such matcher: {sign}; there are {', '.join(MATCHERS)}")
    if isinstance(wanted, (Mapping, list)):
        for part in wanted.values() if isinstance(wanted, Mapping) else wanted:
            check(part)


def shown(value: Any) -> str:
    """A shortened text of a value."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 200 else text[:200] + "…"


def _sign(wanted: Any) -> str:
    """The matcher's name; empty: a plain value."""
    if isinstance(wanted, Mapping) and len(wanted) == 1:
        (name,) = wanted
        return name if name.startswith("$") else ""
    return ""


def _in_order(wanted: Sequence[Any], given: Any) -> bool:
    if not isinstance(given, list) or len(given) != len(wanted):
        return False
    return all(map(matches, wanted, given))


def _in_any_order(wanted: Sequence[Any], given: Any) -> bool:
    if not isinstance(given, list) or len(given) != len(wanted) or len(wanted) > MAX_SET_ITEMS:
        return False
    return any(_in_order(order, given) for order in permutations(wanted))


def _like(text: str) -> str:
    return " ".join(text.casefold().rstrip(".!\n ").split())


def _defines(names: Sequence[str], given: Any) -> bool:
    try:
        tree = ast.parse(given)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return False
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return set(names) <= {node.name for node in tree.body if isinstance(node, kinds)}


def _of_text(test: Callable[[str, str], bool]) -> Callable[[Any, Any], bool]:
    return lambda wanted, given: isinstance(given, str) and test(str(wanted), given)


MATCHERS: Mapping[str, Callable[[Any, Any], bool]] = {
    "$in": lambda wanted, given: any(matches(each, given) for each in wanted),
    "$has": _of_text(lambda wanted, given: wanted.casefold() in given.casefold()),
    "$like": _of_text(lambda wanted, given: _like(wanted) == _like(given)),
    "$lines": _of_text(lambda wanted, given: wanted.strip() == given.strip()),
    "$set": _in_any_order,
    "$maybe": matches,
    "$any": lambda wanted, given: True,
    "$python": _defines,
}
