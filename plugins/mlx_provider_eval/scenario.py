"""Requests to a model with tools, and the expected replies, from YAML."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import jsonschema  # type: ignore[import-untyped]
import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from mlx_provider.errors import BadRequest

from .matching import check

SHIPPED = Path(__file__).with_name("scenarios")
TOOLS = "tools.yaml"
Message = Mapping[str, Any]
Call = Mapping[str, Mapping[str, Any]]
"""`{name: {argument: value or matcher}}`, see `matching`."""


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Text(_Data):
    """Requirements on a text, which must not be empty."""

    has: list[str | list[str]] = Field(default_factory=list)
    """Texts that it contains, in upper or lower case. Of a list, it contains at least one."""
    lacks: list[str] = Field(default_factory=list)


class Expected(_Data):
    """The expected reply: exactly these calls in any order, or no call and a text."""

    calls: list[Call] = Field(default_factory=list)
    text: Text | None = None

    @model_validator(mode="after")
    def _is_something(self) -> Self:
        if bool(self.calls) == (self.text is not None):
            raise ValueError("expect either calls, or text (which may be {})")
        if any(len(call) != 1 for call in self.calls):
            raise ValueError("a call is one name with its arguments")
        for call in self.calls:
            check(dict(call))
        return self


class Step(_Data):
    """One request of a conversation, and the expected reply."""

    say: str | None = None
    results: Mapping[str, str | Mapping[str, str]] = Field(default_factory=dict)
    """Results by tool; or by a value in the call's arguments, if results differ."""
    expect: Expected


class Tool(_Data):
    """A function that the model can call."""

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
    stream: Literal["yes", "both"] = "yes"
    """`both`: with and without streaming; both replies must be equal."""

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
        """Its tools in OpenAI's format."""
        return [
            {"type": "function", "function": {"name": name, **tool.model_dump()}}
            for name, tool in self.tools.items()
        ]

    def tool_choice(self) -> Any:
        if self.choice in ("auto", "required", "none"):
            return self.choice
        return {"type": "function", "function": {"name": self.choice}}


def shipped() -> list[Path]:
    return sorted(path for path in SHIPPED.glob("*.yaml") if path.name != TOOLS)


def read(paths: Sequence[Path]) -> list[Scenario]:
    """Scenarios of these files. Raises `BadRequest` that names file, scenario and fault."""
    known = _mapping(SHIPPED / TOOLS)
    found = [scenario for path in paths for scenario in _of_file(path, known)]
    names = [each.name for each in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadRequest(f"scenarios of one name: {', '.join(twice)}", param="--scenarios")
    return found


def digest(scenarios: Sequence[Scenario]) -> str:
    """A digest. Scores are comparable if it is equal."""
    text = "\n".join(each.model_dump_json() for each in scenarios)
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
    named = fields.get("tools") or []
    if missing := [name for name in named if name not in known]:
        raise ValueError(f"no such tool: {', '.join(missing)}; define it under `define`")
    whole = {**fields, "tools": {name: known[name] for name in named}}
    if "steps" not in whole:
        single = ("say", "results", "expect")
        whole["steps"] = [{name: whole.pop(name) for name in single if name in whole}]
    return whole


def _mapping(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Plain)  # noqa: S506
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}", param="--scenarios") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadRequest(f"{path} is no YAML: {error}", param="--scenarios") from None
    if not isinstance(content, dict):
        raise BadRequest(f"{path} is no mapping", param="--scenarios")
    return content


class _Plain(yaml.SafeLoader):  # type: ignore[misc]  # yaml is untyped
    """Keeps dates as text, as in JSON."""


_Plain.yaml_implicit_resolvers = {
    first: [each for each in resolvers if each[0] != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
