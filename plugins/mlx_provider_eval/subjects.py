"""Subjects of a comparison: models with options, loaded in turn by one engine behind a gateway."""

import os
import platform
import shlex
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from mlx_provider.commands import (
    TIMEOUT,
    GenerateRequest,
    ModelOptions,
    ModelStatus,
    PluginRegistry,
    SeparateGateway,
    checkpoint,
    folder_of,
    full_name,
    installed_version,
    proxy_config,
    run_request,
    separate_gateway,
)
from mlx_provider.errors import BadRequest, EngineUnavailable, MLXProviderError

Result = dict[str, Any]
"""What was measured of one subject, for JSON. `skipped`, if there: why it was not measured."""
Messages = Sequence[Mapping[str, Any]]
Progress = Callable[[str], None]
UNSET = "default"  # value with which `--option` leaves the option out
FOLDERS = ("adapter", "draft_model")  # options that may name a folder
GREETING = [{"role": "user", "content": "Hi"}]
PACKAGES = ("mlx-provider", "mlx", "mlx-lm", "mlx-vlm", "transformers", "litellm", "openai")


@dataclass(frozen=True)
class Subject:
    """A model with options."""

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)  # as in `model_info.mlx`
    label: str = ""  # the model, and the values in which it differs from other subjects


@dataclass(frozen=True)
class LoadedSubject:
    """A subject whose model is loaded. `name`: that of its entry in the gateway's config."""

    subject: Subject
    name: str
    status: ModelStatus
    gateway: SeparateGateway

    def count(self, messages: Messages, **more: Any) -> int:
        """Tokens of the prompt. Raises `ContextTooLong`, and other errors of the engine."""
        return self.gateway.engine.count(_request(self.subject, messages, **more))

    def as_json(self) -> Result:
        status = self.status.model_dump(mode="json")
        return {**status, **asdict(self.subject), "device": self.gateway.engine.health().device}


def describe_run() -> Result:
    """The time, the command, versions and the machine, for JSON."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["mlx-provider", *sys.argv[1:]]),
        "versions": {name: number for name in PACKAGES if (number := installed_version(name))},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def make_subjects(models: Sequence[str], written: Sequence[str]) -> list[Subject]:
    """Every model with every combination of the options' values. `written`: options as
    `name=value`. Raises `BadRequest` for a wrong one."""
    values_of: dict[str, dict[str, None]] = {}
    for option in written:
        name, _, value = (part.strip() for part in option.partition("="))
        if not (name and value):
            raise BadRequest(f"--option {option}: write name=value", param="--option")
        values_of.setdefault(name, {})[value] = None
    models = list(dict.fromkeys(map(full_name, models)))
    subjects = []
    for model, *chosen in product(models, *values_of.values()):
        options = dict(zip(values_of, chosen, strict=True))
        compared = [f"{name}={options[name]}" for name in options if len(values_of[name]) > 1]
        label = ", ".join([_short_name(model, models), *compared])
        subjects.append(Subject(model, _parse_options(options), label))
    return subjects


def _short_name(model: str, models: Sequence[str]) -> str:
    """A hub id, or the name of a folder; its path if another model has the same name."""
    short = Path(model).name if model.startswith("/") else model
    return model if sum(Path(other).name == short for other in models) > 1 else short


def _parse_options(texts: Mapping[str, str]) -> dict[str, Any]:
    options = {name: _parse_value(name, text) for name, text in texts.items() if text != UNSET}
    try:
        checked = ModelOptions.model_validate(options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name, known = ".".join(map(str, first["loc"])), sorted(ModelOptions.model_fields)
        unknown = f"no such option; there are {', '.join(known)}"
        why = first["msg"] if first["loc"][0] in known else unknown
        raise BadRequest(f"--option {name}: {why}", param="--option") from None
    return checked.model_dump(mode="json", exclude_unset=True)


def _parse_value(name: str, text: str) -> Any:
    """Read as YAML, as in a config file. What is no YAML stays a text; folders become absolute."""
    try:
        return full_name(text) if name in FOLDERS else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError):
        return text


def check_subjects(subjects: Sequence[Subject], registry: PluginRegistry) -> None:
    """Find errors in models or parsers before anything starts, and download missing models. Raises
    `ModelNotFound`, `UnsupportedModel`, `BadRequest`."""
    for subject in subjects:
        folder_of(subject.model)
        registry.family_for(checkpoint(subject.model).config)
        for option in ("tool_parser", "reasoning_parser"):
            if name := subject.options.get(option):
                getattr(registry, option)(str(name))


def load_subjects(
    subjects: Sequence[Subject], progress: Progress, environ: Mapping[str, str] = os.environ
) -> Generator[LoadedSubject | Result]:
    """Load each subject when the caller asks for it, and yield it, or a result with the reason why
    it does not load. `close()` ends the gateway. Raises `NotInstalled` or `EngineUnavailable` if
    proxy or engine cannot start."""
    with separate_gateway(_config(subjects), environ) as gateway:
        for number, subject in enumerate(subjects, 1):
            progress(subject.label)
            loaded = _load(subject, f"subject-{number}", gateway)
            gateway.proxy.wait_ready()  # the proxy starts while the first model loads
            yield loaded


def _config(subjects: Sequence[Subject]) -> dict[str, Any]:
    config = {**proxy_config("", ""), "model_list": []}
    for number, subject in enumerate(subjects, 1):
        name = f"subject-{number}"
        single = proxy_config(name, subject.model, timeout=TIMEOUT, stream_timeout=TIMEOUT)
        entry = single["model_list"][0]
        # Subjects with the same model must not share prefixes, because their options differ.
        entry["model_info"]["mlx"] = {**subject.options, "cache_salt": name}
        config["model_list"].append(entry)
    return config


def _load(subject: Subject, name: str, gateway: SeparateGateway) -> LoadedSubject | Result:
    before = _models(gateway)
    try:
        run_request(gateway.engine, _request(subject, GREETING, max_tokens=1))
    except EngineUnavailable:
        raise
    except MLXProviderError as error:
        return {**asdict(subject), "skipped": error.message}
    # if an equal subject has loaded the model before, no status is new
    same_model = [status for status in _models(gateway) if status.model == subject.model]
    if not same_model:
        return {**asdict(subject), "skipped": "unloaded after a request: leave keep_alive out"}
    added = [status for status in same_model if status not in before] or same_model
    return LoadedSubject(subject, name, added[-1], gateway)


def _models(gateway: SeparateGateway) -> list[ModelStatus]:
    try:
        return gateway.engine.health().models
    except EngineUnavailable:  # the first request starts it
        return []


def _request(subject: Subject, messages: Messages, **more: Any) -> GenerateRequest:
    options = ModelOptions.model_validate(dict(subject.options))
    copied = [dict(message) for message in messages]
    return GenerateRequest(model=subject.model, messages=copied, options=options, **more)
