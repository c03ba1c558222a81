"""A chat service with tiny models in this process, and a client that joins its events."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from in_process import InProcessClient
from mlx_provider.client.generation import Generation
from mlx_provider.engine.step_output import Post
from mlx_provider.protocol.events import (
    Delta,
    Done,
    ErrorBody,
    Event,
    Failed,
    Finish,
    TokenLogprob,
    Usage,
)
from mlx_provider.protocol.requests import GenerateRequest, ModelOptions, Sampling
from mlx_provider.records.extensions import MOST_DRAFTS
from mlx_provider.registry import PluginRegistry
from mlx_provider.serving.service import ChatService
from mlx_provider.serving.weights import ModelView
from mlx_provider.settings import EngineSettings
from mlx_provider.testing.driver import Eager
from tiny import build
from waiting import PATIENCE

PLAIN = """\
{%- if tools -%}<|im_start|>system
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
Call one as <tool_call>
{"name": <name>, "arguments": <object>}
</tool_call><|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
"""Tools in the Hermes format, no thoughts."""
GREEDY = Sampling(temperature=0)


@dataclass
class Choice:
    """One choice, joined from its deltas."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """Name and arguments of each call, as text."""
    ids: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str = ""

    @property
    def arguments(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(text)) for name, text in self.calls]

    @property
    def tokens(self) -> list[int]:
        return [each.id for each in self.logprobs]

    def take(self, delta: Delta) -> None:
        self.content += delta.content
        self.reasoning += delta.reasoning
        self.logprobs += delta.logprobs
        for piece in delta.tool_calls:
            if piece.index == len(self.calls):
                assert piece.id
                assert piece.name
                self.calls.append([piece.name, ""])
                self.ids.append(piece.id)
            self.calls[piece.index][1] += piece.arguments


@dataclass
class Answer:
    """The complete result of one request."""

    prompt_tokens: int
    warnings: list[str]
    choices: list[Choice]
    usage: Usage | None = None
    error: ErrorBody | None = None
    deltas: int = 0

    @property
    def only(self) -> Choice:
        assert self.error is None, self.error
        (choice,) = self.choices
        return choice

    def take(self, event: Event) -> None:
        if isinstance(event, Delta):
            self.deltas += 1
            self.choices[event.index].take(event)
        elif isinstance(event, Finish):
            self.choices[event.index].reason = event.reason
        elif isinstance(event, Done):
            self.usage = event.usage
        elif isinstance(event, Failed):
            self.error = event.error


@dataclass
class Tiny:
    """One model of a service."""

    client: InProcessClient
    service: ChatService
    model: str

    def start(self, text: str = "Hello", **given: Any) -> Generation:
        asked: dict[str, Any] = {"model": self.model, "max_tokens": 16, "sampling": GREEDY, **given}
        if "messages" not in asked and "prompt" not in asked:
            asked["messages"] = [{"role": "user", "content": text}]
        return self.client.submit(GenerateRequest(**asked))

    def read(self, generation: Generation, choices: int = 1, begun: Sequence[Event] = ()) -> Answer:
        """begun: what was read of it before."""
        accepted = generation.accepted
        empty = [Choice() for _ in range(choices)]
        answer = Answer(accepted.prompt_tokens, accepted.warnings, empty)
        for event in begun:
            answer.take(event)
        while events := generation.get(PATIENCE):
            for event in events:
                answer.take(event)
        return answer

    def ask(self, text: str = "Hello", **given: Any) -> Answer:
        return self.read(self.start(text, **given), given.get("n", 1))

    def beside(self, folder: Path | str) -> "Tiny":
        """Another model of the same service."""
        return Tiny(self.client, self.service, str(folder))

    def served(self, options: ModelOptions | None = None) -> ModelView:
        """The model as requests with these options get it."""
        view, lease = self.service.models.use(self.model, options or ModelOptions())
        lease.release()
        return view

    @contextmanager
    def pausing(self, after: int = 0) -> Iterator[None]:
        """In the block, its engine takes requests, but runs so many steps only."""
        engine, steps = self.served().engine, count()
        step = engine.step

        def some() -> list[Post]:
            if next(steps) < after:
                return step()
            time.sleep(0.001)
            return []

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "step", some)
            yield

    def prompt_of(self, **given: Any) -> str:
        """The rendered prompt of a request."""
        from mlx_provider.serving.prompt import render_prompt

        request = GenerateRequest(model=self.model, **given)
        view, lease = self.service.models.use(self.model, request.options)
        with lease:
            return render_prompt(view, request).prompt.text


MakeService = Callable[..., tuple[ChatService, InProcessClient]]


@pytest.fixture
def make_service() -> Iterator[MakeService]:
    """Makes services with given settings, which close with the test."""
    made: list[ChatService] = []

    def make(
        registry: PluginRegistry | None = None, **settings: Any
    ) -> tuple[ChatService, InProcessClient]:
        service = ChatService(EngineSettings(**settings), registry=registry)
        made.append(service)
        return service, InProcessClient(service)

    yield make
    for service in made:
        service.close()


@pytest.fixture(scope="session")
def shared_service() -> Iterator[ChatService]:
    service = ChatService(EngineSettings())
    yield service
    service.close()


BuildTiny = Callable[..., Path]


@pytest.fixture(scope="session")
def build_tiny(tmp_path_factory: pytest.TempPathFactory) -> BuildTiny:
    """A tiny model folder; `template`: its chat template, if not the family's own."""

    def make(family: str = "qwen3", template: str | None = None, **options: Any) -> Path:
        folder = build(tmp_path_factory.mktemp("tiny") / family, family, **options)
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return folder

    return make


TinyOf = Callable[..., Tiny]


@pytest.fixture(scope="session")
def tiny(shared_service: ChatService, build_tiny: BuildTiny) -> TinyOf:
    """A tiny model on the service that all tests share, built once per kind."""

    @cache
    def make(family: str = "qwen3", template: str | None = None, **options: Any) -> Tiny:
        folder = build_tiny(family, template, **options)
        return Tiny(InProcessClient(shared_service), shared_service, str(folder))

    return make


@pytest.fixture(scope="session")
def qwen(tiny: TinyOf) -> Tiny:
    """Random words, tool calls in the Hermes format, no thoughts."""
    return tiny("qwen3", PLAIN)


@pytest.fixture
def own_model(make_service: MakeService) -> Callable[..., Tiny]:
    """`own_model(folder, **settings)`: a model on a separate service."""

    def make(folder: Path | str, **settings: Any) -> Tiny:
        service, client = make_service(**settings)
        return Tiny(client, service, str(folder))

    return make


@pytest.fixture(scope="session")
def tiny_class() -> type[Tiny]:
    """For services that tests share: `tiny_class(client, service, folder)`."""
    return Tiny


@pytest.fixture
def eager_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft in every step; otherwise the decision depends on measured times."""

    def eager(most: int = MOST_DRAFTS) -> Eager:
        policy = Eager()
        policy.most = most
        return policy

    monkeypatch.setattr("mlx_provider.engine.speculation.speculation.Policy", eager)
