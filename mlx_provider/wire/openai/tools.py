"""Tools of chat."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...errors import wrong_part
from ...invalid import shown
from ..api import expect_object

MEMBERS = ("name", "description", "parameters", "strict", "return", "returns", "response")
SETTLED = ("type", "function", "cache_control", "eager_input_streaming")
MOST_NAMES = 32


def as_functions(tools: Sequence[Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The tools of a request, and the members of them without effect: each once, with its first
    place."""
    functions: list[dict[str, Any]] = []
    ignored: dict[str, str] = {}
    for at, tool in enumerate(tools):
        own = _function(tool, f"tools[{at}]")
        unknown = [f".{name}" for name in without(tool, SETTLED)]
        unknown += [f".function.{name}" for name in without(own, MEMBERS)]
        ignored = {name: f"tools[{at}]{name}" for name in unknown} | ignored
        function = {name: value for name, value in own.items() if name in MEMBERS}
        functions.append({"type": "function", "function": function})
    return functions, [*ignored.values()][:MOST_NAMES]


def without(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    return {
        name: value
        for name, value in given.items()
        if name not in known and value not in (None, False)
    }


def _function(tool: Any, where: str) -> Mapping[str, Any]:
    kind = expect_object(tool, where).get("type") or "function"
    if kind != "function":
        called = "only tools of type function can be called, and no server runs others here"
        raise wrong_part(where, f"is {shown(kind)}: {called}", ".type")
    own = tool.get("function")
    if not isinstance(own, Mapping):
        raise wrong_part(where, "must be an object with a name", ".function")
    if not isinstance(own.get("name"), str) or not own["name"].strip():
        raise wrong_part(f"{where}.function.name", "must be a text")
    if own.get("parameters"):
        expect_object(own["parameters"], f"{where}.function.parameters")
    return own
