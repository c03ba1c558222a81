"""One gateway for several subjects, for requests of an OpenAI client."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_provider.commands import (
    TIMEOUT,
    Apart,
    EngineClient,
    GenerateRequest,
    Health,
    ModelOptions,
    ModelStatus,
    PluginRegistry,
    answered,
    checkpoint,
    folder_of,
    gateway_apart,
    proxy_config,
)
from mlx_provider.errors import EngineUnavailable, MLXProviderError, UnsupportedModel

from .subjects import Subject

Tell = Callable[[str, str], None]
"""(phase, what) for the user's eyes."""
HELLO = [{"role": "user", "content": "Hi"}]
READ_BY = {"GEMMA3_SLIDING_WINDOW": "gemma3"}
"""Variables that one plugin's families alone read; for other models they would change nothing."""


@dataclass(frozen=True)
class Staged:
    """A loaded subject, and the address of its gateway."""

    subject: Subject
    name: str
    """The model name for clients."""
    status: ModelStatus
    options: ModelOptions
    apart: Apart

    @property
    def url(self) -> str:
        return self.apart.proxy.url

    @property
    def key(self) -> str:
        return self.apart.proxy.key

    @property
    def engine(self) -> EngineClient:
        return self.apart.engine

    def health(self) -> Health:
        return self.engine.health()

    def request(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> GenerateRequest:
        """A request as the gateway would send it to the engine."""
        return GenerateRequest(
            model=self.subject.model,
            messages=[dict(each) for each in messages],
            options=self.options,
            **more,
        )

    def require_gateway(self) -> None:
        """Raises `EngineUnavailable` with the log's last lines if the proxy has ended."""
        if self.apart.proxy.process.poll() is not None:
            self.apart.proxy.wait_ready()


@dataclass(frozen=True)
class Skipped:
    subject: Subject
    why: str


def prepare(subjects: Sequence[Subject], registry: PluginRegistry) -> None:
    """Find errors in models, parsers or variables before anything starts.

    Downloads missing models. Raises `ModelNotFound`, `UnsupportedModel`, `BadRequest`.
    """
    for subject in subjects:
        folder_of(subject.model)
        family, plugin = registry.family_for(checkpoint(subject.model).config)
        for variable in subject.variables:
            if (reader := READ_BY.get(variable)) not in (None, plugin.name):
                raise UnsupportedModel(
                    f"{variable} is read by plugin {reader} alone; {subject.model} is served by "
                    f"family {family.name} of plugin {plugin.name}: leave the variable out for it"
                )
        if name := subject.options.get("tool_parser"):
            registry.tool_parser(str(name))
        if name := subject.options.get("reasoning_parser"):
            registry.reasoning_parser(str(name))


def staging(
    subjects: Sequence[Subject], tell: Tell, environ: Mapping[str, str] = os.environ
) -> Generator[Staged | Skipped]:
    """Subjects one after the other. Each is loaded at its turn.

    Those with the same variables share a gateway, which ends with them or with `close()`. Raises
    `NotInstalled` or `EngineUnavailable` if proxy or engine cannot start.
    """
    groups: dict[tuple[tuple[str, str], ...], list[Subject]] = {}
    for subject in subjects:
        groups.setdefault(tuple(sorted(subject.variables.items())), []).append(subject)
    for variables, members in groups.items():
        with gateway_apart(_config(members), {**environ, **dict(variables)}) as apart:
            for number, subject in enumerate(members):
                tell("model", subject.label)
                staged = _loaded(subject, _name(number), apart)
                apart.proxy.wait_ready()  # it has started in the meantime
                yield staged


def _config(members: Sequence[Subject]) -> dict[str, Any]:
    config = proxy_config("", "")
    config["model_list"] = []
    for number, subject in enumerate(members):
        limits = {"timeout": TIMEOUT, "stream_timeout": TIMEOUT}
        (entry,) = proxy_config(_name(number), subject.model, **limits)["model_list"]
        # Subjects with the same model must not share prefixes, because their options differ.
        entry["model_info"]["mlx"] = {**subject.options, "cache_salt": _name(number)}
        config["model_list"].append(entry)
    return config


def _name(number: int) -> str:
    return f"subject-{number + 1}"


def _loaded(subject: Subject, name: str, apart: Apart) -> Staged | Skipped:
    options = ModelOptions.model_validate(dict(subject.options))
    request = GenerateRequest(model=subject.model, messages=HELLO, max_tokens=1, options=options)
    before = _models(apart.engine)
    try:
        answered(apart.engine, request)
    except EngineUnavailable:
        raise
    except MLXProviderError as error:
        return Skipped(subject, error.message)
    there = [each for each in _models(apart.engine) if each.model == subject.model]
    added = [each for each in there if each not in before] or there
    return Staged(
        subject=subject,
        name=name,
        status=added[-1],
        options=options,
        apart=apart,
    )


def _models(engine: EngineClient) -> list[ModelStatus]:
    try:
        return engine.health().models
    except EngineUnavailable:  # the first request starts it
        return []
