"""The subjects of a comparison: models with options and engine variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from mlx_provider.commands import full_name
from mlx_provider.errors import BadRequest

DEFAULT = "default"
"""As a value: the option or variable is left out."""
Named = Mapping[str, Sequence[str]]
"""The values of each name, in the order of the command line."""
FOLDERS = ("adapter", "draft_model")
"""Options that may name a folder."""


@dataclass(frozen=True)
class Subject:
    """A model with its options and variables."""

    model: str
    """The name after `mlx/`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options for the engine, as in `model_info.mlx` of a config entry."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of the engine's environment."""

    label: str = ""
    """A label: the model, and the values in which it differs from other subjects."""

    def encoded(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "options": dict(self.options),
            "environment": dict(self.variables),
            "label": self.label,
        }


def values(written: Sequence[str], flag: str) -> dict[str, list[str]]:
    """Values of `name=value` arguments, by name. Raises `BadRequest`."""
    found: dict[str, list[str]] = {}
    for word in written:
        name, sign, value = word.partition("=")
        if not (name and sign):
            raise BadRequest(f"{flag} {word}: write name=value", param=flag)
        given = found.setdefault(name.strip(), [])
        given += [value.strip()] if value.strip() not in given else []
    return found


def subjects(models: Sequence[str], options: Named, variables: Named) -> list[Subject]:
    """Every model with every combination of values. Raises `BadRequest` for a wrong option."""
    found = [
        Subject(full_name(model), _options(chosen), around)
        for model in dict.fromkeys(models)
        for around in _combined(variables)
        for chosen in _combined(options)
    ]
    compared = [name for named in (options, variables) for name in named if len(named[name]) > 1]
    names = {each.model: _short(each.model, found) for each in found}
    return [replace(each, label=_label(each, names[each.model], compared)) for each in found]


def _label(subject: Subject, name: str, compared: Sequence[str]) -> str:
    chosen = {**subject.options, **subject.variables}
    return ", ".join([name, *(f"{each}={chosen.get(each, DEFAULT)}" for each in compared)])


def _short(model: str, among: Sequence[Subject]) -> str:
    """The last part of a folder, unless another model has the same one."""
    if not model.startswith("/"):
        return model
    name = Path(model).name
    alike = {each.model for each in among if Path(each.model).name == name}
    return name if len(alike) == 1 else model


def _combined(named: Named) -> Iterator[dict[str, str]]:
    for choice in product(*named.values()):
        pairs = zip(named, choice, strict=True)
        yield {name: value for name, value in pairs if value != DEFAULT}


def _options(written: Mapping[str, str]) -> dict[str, Any]:
    from pydantic import ValidationError

    from mlx_provider.commands import ModelOptions

    chosen = {name: _value(name, text) for name, text in written.items()}
    try:
        ModelOptions.model_validate(chosen)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name, known = ".".join(map(str, first["loc"])), sorted(ModelOptions.model_fields)
        there = f"no such option; there are {', '.join(known)}"
        why = first["msg"] if first["loc"][0] in known else there
        raise BadRequest(f"--option {name}: {why}", param="--option") from None
    return chosen


def _value(name: str, text: str) -> Any:
    """A value as in a config file: a number, `true`, a text."""
    import yaml

    if name in FOLDERS:
        return full_name(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
