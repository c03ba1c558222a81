"""The subjects of a comparison: models with options. They are loaded one after the other behind one
gateway, which an OpenAI client asks."""

import os
import platform
import shlex
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
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
"""Of one subject, as JSON types. With `skipped` it has a reason instead of measurements."""
Progress = Callable[[str], None]
DEFAULT = "default"
"""As a value: the option is left out."""
FOLDERS = ("adapter", "draft_model")
"""Options that may name a folder."""
SECONDS = 3600.0
"""For one reply: a long prompt takes its time on a small machine."""
HELLO = [{"role": "user", "content": "Hi"}]
PACKAGES = ("mlx-provider", "mlx", "mlx-lm", "mlx-vlm", "transformers", "litellm", "openai")


@dataclass(frozen=True)
class Subject:
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """As in `model_info.mlx` of a config entry."""
    label: str = ""
    """The model, and the values in which it differs from other subjects."""


@dataclass(frozen=True)
class LoadedSubject:
    subject: Subject
    name: str
    status: ModelStatus
    gateway: SeparateGateway

    def count(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> int:
        return self.gateway.engine.count(_request(self.subject, messages, **more))

    def as_json(self) -> Result:
        status = self.status.model_dump(mode="json")
        return {**status, **asdict(self.subject), "device": self.gateway.engine.health().device}


def conditions() -> Result:
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["mlx-provider", *sys.argv[1:]]),
        "versions": {name: number for name in PACKAGES if (number := installed_version(name))},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def subjects(models: Sequence[str], written: Sequence[str]) -> list[Subject]:
    """Every model with every combination of the options, which are `name=value`.

    Raises `BadRequest` for a wrong option.
    """
    values: dict[str, dict[str, None]] = {}
    for word in written:
        name, sign, value = (part.strip() for part in word.partition("="))
        if not (name and sign and value):
            raise BadRequest(f"--option {word}: write name=value", param="--option")
        values.setdefault(name, {})[value] = None
    names = list(dict.fromkeys(map(full_name, models)))
    found = []
    for model, choice in product(names, list(product(*values.values()))):
        short = Path(model).name if model.startswith("/") else model
        alike = [name for name in names if Path(name).name == short]
        title = model if len(alike) > 1 else short
        chosen = dict(zip(values, choice, strict=True))
        compared = [f"{name}={chosen[name]}" for name in chosen if len(values[name]) > 1]
        found.append(Subject(model, _options(chosen), ", ".join([title, *compared])))
    return found


def _options(written: Mapping[str, str]) -> dict[str, Any]:
    chosen = {name: _value(name, text) for name, text in written.items() if text != DEFAULT}
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
    try:
        return full_name(text) if name in FOLDERS else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError):
        return text


def prepare(chosen: Sequence[Subject], registry: PluginRegistry) -> None:
    """Find errors in models or parsers before anything starts, and download missing models.

    Raises `ModelNotFound`, `UnsupportedModel`, `BadRequest`.
    """
    for subject in chosen:
        folder_of(subject.model)
        registry.family_for(checkpoint(subject.model).config)
        for part in ("tool_parser", "reasoning_parser"):
            if name := subject.options.get(part):
                getattr(registry, part)(str(name))


def load_subjects(
    chosen: Sequence[Subject], progress: Progress, environ: Mapping[str, str] = os.environ
) -> Generator[LoadedSubject | Result]:
    """Subjects one after the other, each loaded at its turn, or the reason why it does not load.
    `close()` ends their gateway.

    Raises `NotInstalled` or `EngineUnavailable` if proxy or engine cannot start.
    """
    with separate_gateway(_config(chosen), environ) as gateway:
        for number, subject in enumerate(chosen, 1):
            progress(subject.label)
            loaded = _load(subject, f"subject-{number}", gateway)
            gateway.proxy.wait_ready()  # it has started in the meantime
            yield loaded


def _config(chosen: Sequence[Subject]) -> dict[str, Any]:
    config = {**proxy_config("", ""), "model_list": []}
    for number, subject in enumerate(chosen, 1):
        name = f"subject-{number}"
        made = proxy_config(name, subject.model, timeout=TIMEOUT, stream_timeout=TIMEOUT)
        (entry,) = made["model_list"]
        # Subjects with the same model must not share prefixes, because their options differ.
        entry["model_info"]["mlx"] = {**subject.options, "cache_salt": name}
        config["model_list"].append(entry)
    return config


def _load(subject: Subject, name: str, gateway: SeparateGateway) -> LoadedSubject | Result:
    before = _models(gateway)
    try:
        run_request(gateway.engine, _request(subject, HELLO, max_tokens=1))
    except EngineUnavailable:
        raise
    except MLXProviderError as error:
        return {**asdict(subject), "skipped": error.message}
    there = [status for status in _models(gateway) if status.model == subject.model]
    added = [status for status in there if status not in before] or there
    return LoadedSubject(subject, name, added[-1], gateway)


def _models(gateway: SeparateGateway) -> list[ModelStatus]:
    try:
        return gateway.engine.health().models
    except EngineUnavailable:  # the first request starts it
        return []


def _request(
    subject: Subject, messages: Sequence[Mapping[str, Any]], **more: Any
) -> GenerateRequest:
    options = ModelOptions.model_validate(dict(subject.options))
    said = [dict(message) for message in messages]
    return GenerateRequest(model=subject.model, messages=said, options=options, **more)


@dataclass(frozen=True)
class ReplyCall:
    id: str
    name: str
    arguments: str

    def as_json(self) -> dict[str, str]:
        return {"name": self.name, "arguments": self.arguments}


@dataclass(frozen=True)
class Reply:
    text: str = ""
    thought: str = ""
    calls: tuple[ReplyCall, ...] = ()
    finish: str = ""
    prompt_tokens: int = 0
    skipped: int = 0
    tokens: int = 0
    failure: str = ""

    def message(self) -> dict[str, Any]:
        calls = [
            {"id": call.id, "type": "function", "function": call.as_json()} for call in self.calls
        ]
        message = {"role": "assistant", "content": self.text}
        return {**message, "tool_calls": calls} if calls else message

    def as_json(self) -> dict[str, Any]:
        calls = [call.as_json() for call in self.calls]
        optional = {"thought": self.thought, "calls": calls, "failure": self.failure}
        present = {name: value for name, value in optional.items() if value}
        return {"text": self.text, "finish": self.finish, **present}


class Client:
    def __init__(self, loaded: LoadedSubject, max_tokens: int, body: Mapping[str, Any]) -> None:
        """`body`: further fields of every request."""
        import openai

        self._proxy = loaded.gateway.proxy
        own = {"model": loaded.name, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        usage = {"stream_options": {"include_usage": True}}
        self._body: dict[str, Any] = {**own, **usage, "extra_body": dict(body)}
        self._openai = openai.OpenAI(
            base_url=f"{self._proxy.url}/v1",
            api_key=self._proxy.key,
            max_retries=0,
            timeout=SECONDS,
            http_client=openai.DefaultHttpxClient(trust_env=False),  # loopback needs no proxy
        )
        self.close = self._openai.close

    def ask(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> Reply:
        """One reply. A request that fails is a reply with a failure.

        Raises `EngineUnavailable` with the log's last lines if the gateway has ended.
        """
        import openai

        body = {**self._body, "messages": list(messages), **more}
        try:
            return _assemble(self._openai.chat.completions.create(**body))
        except openai.APIStatusError as error:
            return Reply(failure=f"HTTP {error.status_code}: {error.message[:500]}")
        except openai.APIError as error:
            if self._proxy.process.poll() is not None:
                self._proxy.wait_ready()
            return Reply(failure=f"{type(error).__name__}: {error.message[:500]}")


def _assemble(chunks: Iterable[Any]) -> Reply:
    text = thought = finish = ""
    prompt_tokens = skipped = tokens = 0
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            said = choice.delta
            text += said.content or ""
            thought += getattr(said, "reasoning_content", None) or ""
            finish = choice.finish_reason or finish
            for piece in said.tool_calls or ():
                call = calls.setdefault(piece.index, ["", "", ""])
                call[0] = call[0] or piece.id or ""
                if piece.function is not None:
                    call[1] += piece.function.name or ""
                    call[2] += piece.function.arguments or ""
        if (usage := getattr(chunk, "usage", None)) is not None:
            prompt_tokens, tokens = usage.prompt_tokens, usage.completion_tokens
            skipped = getattr(usage.prompt_tokens_details, "skipped_tokens", 0) or 0
    made = tuple(ReplyCall(*calls[index]) for index in sorted(calls))
    return Reply(text, thought, made, finish, prompt_tokens, skipped, tokens)
