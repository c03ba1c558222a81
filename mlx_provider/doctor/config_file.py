"""`config.yaml` of a LiteLLM proxy in the working folder."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ..protocol.requests import ALLOWED_MEDIA, REMOVED, RENAMED, OperatorOptions
from ..safe_open import read_bounded
from .findings import Finding
from .machine import strange_names
from .subject import Subject

CONFIG, PREFIX, HANDLER = "config.yaml", "mlx/", "mlx_provider.litellm.handler"
LARGEST = 2**22
"""Bytes of the file."""
SECTIONS = (
    "model_list",
    "litellm_settings",
    "general_settings",
    "router_settings",
    "environment_variables",
)
WHERE = "model_info.mlx"
OPTIONS = frozenset(OperatorOptions.model_fields)
EARLIER = frozenset([*RENAMED, *ALLOWED_MEDIA, *REMOVED])
"""Old names, which the options themselves read or refuse."""
MAP = "custom_provider_map"
MAP_LINES = f"litellm_settings: {{{MAP}: [{{provider: mlx, custom_handler: {HANDLER}}}]}}"
Fields = Mapping[str, Any]


def config_file(subject: Subject) -> Iterator[Finding]:
    """Nothing if there is no file, or if it does not concern this package."""
    path = subject.working_folder / CONFIG
    try:
        text = read_bounded(path, LARGEST).decode()
        content = _fields(yaml.safe_load(text))
    except FileNotFoundError:
        return
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        summary = f"{path} cannot be read: {' '.join(str(error).split())[:300]}"
        yield Finding("config.file", "fail", summary, "correct the file")
        return
    entries = [each for each in _list(content.get("model_list")) if _model(each)]
    if not entries and "mlx_provider" not in text:
        return
    problems = [*_sections(content), *_handler(content)]
    for entry in entries:
        problems += _options(entry, subject)
        problems += _folder(entry, path)
    yield from problems
    if not problems:
        summary = f"{path}: {len(entries)} entries for models of this package"
        yield Finding("config.file", "ok", summary)


def _sections(content: Fields) -> Iterator[Finding]:
    for name in content:
        if name not in SECTIONS and (hint := _like(name, SECTIONS)):
            summary = f"{CONFIG}: LiteLLM reads no section {name!r}"
            yield Finding("config.sections", "warn", summary, hint)


def _handler(content: Fields) -> Iterator[Finding]:
    """Whether LiteLLM routes `mlx/` to this package."""
    settings = _fields(content.get("litellm_settings"))
    handlers = {
        each.get("provider"): str(each.get("custom_handler")) for each in _list(settings.get(MAP))
    }
    found = handlers.get("mlx")
    if found == HANDLER:
        return
    if found is None:
        wrong = next((name for name in settings if _like(name, [MAP])), None) or next(
            (str(name) for name in handlers if str(name).strip("/ ").lower() == "mlx"), None
        )
        instead = f" ({wrong!r} is not its name)" if wrong else ""
        summary = f"{CONFIG}: no handler of the provider `mlx` is named{instead}"
        yield Finding("config.handler", "fail", summary, f"write {MAP_LINES}")
    elif "mlx_provider" in found or _like(found, [HANDLER]):
        summary = f"{CONFIG}: there is no handler {found!r}"
        yield Finding("config.handler", "fail", summary, f"did you mean {HANDLER!r}?")
    else:
        summary = f"{CONFIG}: {found!r} handles `mlx`, not this package"
        yield Finding("config.handler", "note", summary)


def _options(entry: Fields, subject: Subject) -> Iterator[Finding]:
    info, params = _fields(entry.get("model_info")), _fields(entry.get("litellm_params"))
    for part, fields in (("litellm_params", params), ("model_info", info)):
        for name in fields.keys() & OPTIONS:
            yield _wrong(entry, f"{part}.{name} has no effect", f"write it as {WHERE}.{name}")
    if "mlx" in params:
        yield _wrong(entry, "litellm_params.mlx has no effect", f"write it as {WHERE}")
    nested = info.get("mlx") or {}
    if not isinstance(nested, Mapping):
        yield _wrong(entry, f"{WHERE} is not a mapping", f"write {WHERE}: {{kv_bits: 8}}")
        return
    flat = {str(name)[4:]: value for name, value in info.items() if str(name).startswith("mlx_")}
    given = flat | {str(name): value for name, value in nested.items()}
    for name in given.keys() - OPTIONS - EARLIER:
        hint = _like(name, OPTIONS) or f"there are {', '.join(sorted(OPTIONS))}"
        yield _wrong(entry, f"{WHERE}.{name} is no option", hint)
    try:
        known = {name: given[name] for name in given if name in OPTIONS | EARLIER}
        options = OperatorOptions.model_validate(known)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            name = ".".join([WHERE, *map(str, each["loc"])])
            yield _wrong(entry, f"{name}: {each['msg']}", "correct it")
        return
    for summary in strange_names(subject, _model(entry), options):
        yield _wrong(entry, summary, "name one that `mlx-provider plugins` lists")


def _folder(entry: Fields, config: Path) -> Iterator[Finding]:
    """A folder that does not exist, or that depends on where an engine starts."""
    name = _model(entry)
    if _fields(entry.get("litellm_params")).get("api_base") or not name.startswith(("/", ".", "~")):
        return
    path = Path(name).expanduser()
    if not (config.parent / path).is_dir():
        yield _wrong(entry, f"no folder {name}", "write the full path of a model's folder")
    elif not path.is_absolute():
        full = (config.parent / path).resolve()
        summary = f"{name} depends on the folder in which an engine was started"
        yield _wrong(entry, summary, f"write model: {PREFIX}{full}")


def _wrong(entry: Fields, summary: str, remedy: str) -> Finding:
    name = entry.get("model_name")
    return Finding("config.entries", "fail", f"{CONFIG}, {name!r}: {summary}", remedy)


def _model(entry: Fields) -> str:
    """Empty for a model of another provider."""
    model = str(_fields(entry.get("litellm_params")).get("model"))
    return model.removeprefix(PREFIX) if model.startswith(PREFIX) else ""


def _like(name: object, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), known, 1)
    return f"did you mean {near[0]!r}?" if near else ""


def _fields(value: object) -> Fields:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Fields]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []
