"""Requests to a model with tools, and the replies that they expect, from YAML. Expected arguments
are values or matchers such as `{$in: [a, b]}`: docs/evaluation.md lists them."""

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
TOOLS = "tools.yaml"
Call = Mapping[str, Mapping[str, Any]]
"""`{name: {argument: value or matcher}}`."""


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Text(_Data):
    """Requirements on a text, which must not be empty."""

    has: list[str | list[str]] = Field(default_factory=list)
    """Texts that it contains, in upper or lower case. Of a list, it contains at least one."""
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
    say: str | None = None
    results: Mapping[str, str | Mapping[str, str]] = Field(default_factory=dict)
    """Results by tool; or by a value in the call's arguments, if results differ."""
    expect: Expected


class Tool(_Data):
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
    id: str
    kind: str
    tools: Mapping[str, Tool]
    system: str | None = None
    history: list[dict[str, Any]] = Field(default_factory=list)
    """Messages before the first step, unchanged."""
    steps: list[Step] = Field(min_length=1)
    choice: str = "auto"
    """`auto`, `required`, `none`, or the name of the tool that must be called."""
    parallel: bool = True

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
        return [
            {"type": "function", "function": {"name": name, **tool.model_dump()}}
            for name, tool in self.tools.items()
        ]

    def tool_choice(self) -> Any:
        if self.choice in ("auto", "required", "none"):
            return self.choice
        return {"type": "function", "function": {"name": self.choice}}


def shipped_scenarios() -> list[Path]:
    return sorted(path for path in SHIPPED.glob("*.yaml") if path.name != TOOLS)


def read(paths: Sequence[Path]) -> list[Scenario]:
    known = _mapping(SHIPPED / TOOLS)
    return [scenario for path in paths for scenario in _of_file(path, known)]


def digest(scenarios: Sequence[Scenario]) -> str:
    text = "\n".join(scenario.model_dump_json() for scenario in scenarios)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _of_file(path: Path, known: Mapping[str, Any]) -> Iterator[Scenario]:
    content = _mapping(path)
    known = {**known, **content.pop("define", {})}
    listed = content.pop("scenarios", None)
    if not isinstance(listed, list):
        raise BadRequest(f"{path}: holds no list `scenarios`", param="--scenarios")
    for number, fields in enumerate(listed, 1):
        name = fields.get("id", number) if isinstance(fields, dict) else number
        try:
            yield Scenario.model_validate(_whole({**content, **fields}, known))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            at = ".".join(map(str, first["loc"])) or "scenario"
            why = f"{at}: {first['msg']}"
        except (KeyError, TypeError, ValueError) as error:
            why = str(error)
        else:
            continue
        raise BadRequest(f"{path}, scenario {name}: {why}", param="--scenarios") from None


def _whole(fields: dict[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
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
    """Raises `ValueError` for an unknown matcher at any place."""
    if (sign := _sign(wanted)) and sign not in MATCHERS:
        raise ValueError(f"no such matcher: {sign}; there are {', '.join(MATCHERS)}")
    if isinstance(wanted, (Mapping, list)):
        for part in wanted.values() if isinstance(wanted, Mapping) else wanted:
            check(part)


def brief(value: Any) -> str:
    return f"{json.dumps(value, ensure_ascii=False, default=str):.200}"


def _sign(wanted: Any) -> str:
    names = [*wanted] if isinstance(wanted, Mapping) else []
    return names[0] if len(names) == 1 and names[0].startswith("$") else ""


def orders(wanted: Sequence[Any]) -> Iterable[Sequence[Any]]:
    return permutations(wanted) if len(wanted) <= 6 else [wanted]


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
    "$in": lambda wanted, given: any(matches(value, given) for value in wanted),
    "$has": _of_text(lambda wanted, given: wanted.casefold() in given.casefold()),
    "$like": _of_text(lambda wanted, given: _like(wanted) == _like(given)),
    "$lines": _of_text(lambda wanted, given: wanted.strip() == given.strip()),
    "$set": lambda wanted, given: any(matches([*order], given) for order in orders(wanted)),
    "$maybe": matches,
    "$any": lambda wanted, given: True,
    "$python": _defines,
}
