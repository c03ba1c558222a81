"""Scenarios in YAML: requests with tools, and the replies that they expect. Expected arguments are
values or matchers such as `{$in: [a, b]}`: docs/evaluation.md lists them."""

import ast
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, Self

import jsonschema  # type: ignore[import-untyped]
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from mlx_provider.errors import BadRequest

SHIPPED = Path(__file__).with_name("scenarios")
TOOLS = "tools.yaml"  # the tools that every scenario can name
Call = Mapping[str, Mapping[str, Any]]  # `{name: {argument: value or matcher}}`


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Text(_Data):
    """A text that is not empty and contains all of `has` (of an inner list, at least one) and none
    of `lacks`. Upper and lower case count as equal."""

    has: list[str | list[str]] = Field(default_factory=list)
    lacks: list[str] = Field(default_factory=list)


class Expected(_Data):
    """Exactly these calls in any order, or no call and a text."""

    calls: list[Call] = Field(default_factory=list)
    text: Text | None = None

    @model_validator(mode="after")
    def _is_something(self) -> Self:
        if bool(self.calls) == (self.text is not None):
            raise ValueError("expect either calls, or text (which may be {})")
        if any(len(call) != 1 for call in self.calls):
            raise ValueError("a call is one name with its arguments")
        check([*self.calls])
        return self


class Step(_Data):
    """One request: results for the calls of the reply before, a user's message, or both."""

    say: str | None = None
    results: Mapping[str, str | Mapping[str, str]] = Field(default_factory=dict)
    """The result by tool; if it depends on the call, a table by a value of its arguments."""
    expect: Expected


class Tool(_Data):
    """`parameters`: a JSON schema."""

    description: str
    parameters: dict[str, Any]

    @field_validator("parameters")
    @classmethod
    def _is_a_schema(cls, schema: dict[str, Any]) -> dict[str, Any]:
        try:
            jsonschema.Draft202012Validator.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise ValueError(error.message) from None
        return schema


class Scenario(_Data):
    """A conversation with tools, step by step."""

    id: str
    kind: str
    tools: Mapping[str, Tool]  # by name
    system: str | None = None
    history: list[dict[str, Any]] = Field(default_factory=list)  # messages before the first step
    steps: list[Step] = Field(min_length=1)
    choice: str = "auto"  # or `required`, `none`, or the name of the tool that must be called
    parallel: bool = True  # whether a reply may have several calls

    @model_validator(mode="after")
    def _knows_its_tools(self) -> Self:
        named = {name for step in self.steps for call in step.expect.calls for name in call}
        named |= {name for step in self.steps for name in step.results}
        named |= {self.choice} - {"auto", "required", "none"}
        if unknown := sorted(named - self.tools.keys()):
            raise ValueError(f"{', '.join(unknown)}: not among its tools")
        return self

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.id}"

    def definitions(self) -> list[dict[str, Any]]:
        """The tools in OpenAI's form; `tool_choice` has that form, too."""
        return [
            {"type": "function", "function": {"name": name, **tool.model_dump()}}
            for name, tool in self.tools.items()
        ]

    def tool_choice(self) -> Any:
        if self.choice in ("auto", "required", "none"):
            return self.choice
        return {"type": "function", "function": {"name": self.choice}}


def shipped_scenarios() -> list[Path]:
    """The files of scenarios in this package."""
    return sorted(path for path in SHIPPED.glob("*.yaml") if path.name != TOOLS)


def read(paths: Sequence[Path]) -> list[Scenario]:
    """All scenarios of these files. Raises `BadRequest` that names the first wrong one."""
    known = _mapping(SHIPPED / TOOLS)
    return [scenario for path in paths for scenario in _of_file(path, known)]


def digest(scenarios: Sequence[Scenario]) -> str:
    """Twelve hexadecimal digits. Results with the same digest are comparable."""
    text = "\n".join(scenario.model_dump_json() for scenario in scenarios)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _of_file(path: Path, known: Mapping[str, Any]) -> Iterator[Scenario]:
    content = _mapping(path)
    define, listed = content.pop("define", None) or {}, content.pop("scenarios", None)
    if not isinstance(listed, list):
        raise BadRequest(f"{path}: holds no list `scenarios`", param="--scenarios")
    if not isinstance(define, dict):
        raise BadRequest(f"{path}: `define` is no mapping", param="--scenarios")
    known = {**known, **define}
    for number, fields in enumerate(listed, 1):
        name = fields.get("id", number) if isinstance(fields, dict) else number
        try:
            yield Scenario.model_validate(_complete({**content, **fields}, known))
        except (KeyError, TypeError, ValueError) as error:
            summary = f"{path}, scenario {name}: {_reason(error)}"
            raise BadRequest(summary, param="--scenarios") from None


def _reason(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    at = ".".join(map(str, first["loc"])) or "scenario"
    return f"{at}: {first['msg']}"


def _complete(fields: dict[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Add the definitions of tools. A scenario with one step can omit `steps`."""
    tools = fields.get("tools") or []
    if missing := [name for name in tools if name not in known]:
        raise ValueError(f"no such tool: {', '.join(missing)}; define it under `define`")
    whole = {**fields, "tools": {name: known[name] for name in tools}}
    if "steps" not in whole:
        single = Step.model_fields.keys() & whole.keys()
        whole["steps"] = [{name: whole.pop(name) for name in single}]
    return whole


def _mapping(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}", param="--scenarios") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadRequest(f"{path} is no YAML: {error}", param="--scenarios") from None
    if not isinstance(content, dict):
        raise BadRequest(f"{path} is no mapping", param="--scenarios")
    return dict(json.loads(json.dumps(content, default=str)))  # dates become text


def differences(wanted: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """A description of each wrong argument; empty: all are right."""
    found = []
    for name, value in wanted.items():
        if name not in given and _sign(value) != "$maybe":
            found.append(f"{name} is missing")
        elif name in given and not matches(value, given[name]):
            found.append(f"{name} is {brief(given[name])}, not {brief(value)}")
    invented = [n for n in given if n not in wanted]
    return [*found, *(f"{n} was not asked for: {brief(given[n])}" for n in invented)]


def matches(wanted: Any, given: Any) -> bool:
    """Whether an argument is as wanted: equal, except for matchers at any place of `wanted`."""
    if sign := _sign(wanted):
        return MATCHERS[sign](wanted[sign], given)
    if isinstance(wanted, Mapping):
        return isinstance(given, Mapping) and not differences(wanted, given)
    if isinstance(wanted, list):
        same = isinstance(given, list) and len(given) == len(wanted)
        return same and all(map(matches, wanted, given))
    if isinstance(wanted, bool) or isinstance(given, bool):
        return wanted is given
    return bool(wanted == given)


def check(wanted: Any) -> None:
    """Raises `ValueError` for a wrong matcher at any place."""
    if (sign := _sign(wanted)) and sign not in MATCHERS:
        raise ValueError(f"no such matcher: {sign}; there are {', '.join(MATCHERS)}")
    if sign in ("$in", "$set", "$python") and not isinstance(wanted[sign], list):
        raise ValueError(f"{sign} must have a list")
    if isinstance(wanted, (Mapping, list)):
        for part in wanted.values() if isinstance(wanted, Mapping) else wanted:
            check(part)


def brief(value: Any) -> str:
    """At most 200 characters of JSON."""
    return f"{json.dumps(value, ensure_ascii=False, default=str):.200}"


def _sign(wanted: Any) -> str:
    """The name of a matcher; empty: it is none."""
    names = [*wanted] if isinstance(wanted, Mapping) else []
    return names[0] if len(names) == 1 and names[0].startswith("$") else ""


def orders(wanted: Sequence[Any]) -> Iterable[Sequence[Any]]:
    """All orders of up to six items; of more, only the given one."""
    return permutations(wanted) if len(wanted) <= 6 else [wanted]


def _normalise(text: str) -> str:
    return " ".join(text.casefold().rstrip(".!\n ").split())


def _defines(names: Sequence[str], given: Any) -> bool:
    """Whether a text is Python that defines these functions and classes."""
    try:
        tree = ast.parse(given)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return False
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return set(names) <= {node.name for node in tree.body if isinstance(node, kinds)}


def _of_text(test: Callable[[str, str], bool]) -> Callable[[Any, Any], bool]:
    return lambda wanted, given: isinstance(given, str) and test(str(wanted), given)


MATCHERS: Mapping[str, Callable[[Any, Any], bool]] = {
    "$in": lambda wanted, given: any(matches(value, given) for value in wanted),
    "$has": _of_text(lambda wanted, given: wanted.casefold() in given.casefold()),
    "$like": _of_text(lambda wanted, given: _normalise(wanted) == _normalise(given)),
    "$lines": _of_text(lambda wanted, given: wanted.strip() == given.strip()),
    "$set": lambda wanted, given: any(matches([*order], given) for order in orders(wanted)),
    "$maybe": matches,
    "$any": lambda wanted, given: True,
    "$python": _defines,
}
