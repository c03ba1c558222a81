"""Ask an engine, and judge its greedy tokens by the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlx_provider.client.generation import Generation
from mlx_provider.client.http import HttpClient
from mlx_provider.protocol.events import Delta, Done, Failed, Finish, TokenLogprob, Usage
from mlx_provider.protocol.requests import GenerateRequest, ModelOptions, Sampling

if TYPE_CHECKING:
    from .numpy_llama import NumpyLlama

PATIENCE = 600
GAP = 0.05
"""Nats between two tokens below which another order of sums may swap them."""
TOLERANCE = 0.02
"""Nats by which float32 log-probabilities of two programs may differ."""
Messages = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@dataclass
class Answer:
    """All that one greedy request gave."""

    messages: Messages
    text: str = ""
    pieces: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    calls: list[list[str]] = field(default_factory=list)
    """Name and arguments of each call."""
    reason: str = ""
    usage: Usage | None = None

    @property
    def tokens(self) -> list[int]:
        return [each.id for each in self.logprobs]

    @property
    def cached(self) -> int:
        assert self.usage
        return self.usage.cached_tokens

    def take(self, event: object) -> None:
        if isinstance(event, Delta):
            self.text += event.content
            self.pieces += bool(event.content)
            self.logprobs += event.logprobs
            for piece in event.tool_calls:
                if piece.name is not None:
                    self.calls.append([piece.name, ""])
                self.calls[piece.index][1] += piece.arguments
        elif isinstance(event, Finish):
            self.reason = event.reason
        elif isinstance(event, Done):
            self.usage = event.usage
        elif isinstance(event, Failed):
            raise AssertionError(event.error)


@dataclass(frozen=True)
class Model:
    """A model of an engine, with options of its operator."""

    client: HttpClient
    folder: str
    options: ModelOptions = field(default_factory=ModelOptions)

    def start(self, said: str | Messages, max_tokens: int = 48, **more: Any) -> Started:
        messages = [user(said)] if isinstance(said, str) else said
        more = {"messages": messages, "sampling": Sampling(temperature=0), **more}
        request = GenerateRequest(
            model=self.folder, options=self.options, max_tokens=max_tokens, logprobs=True, **more
        )
        return Started(messages, self.client.submit(request))

    def ask(self, said: str | Messages, max_tokens: int = 48, **more: Any) -> Answer:
        return self.start(said, max_tokens, **more).read()


@dataclass(frozen=True)
class Started:
    """A request whose events nobody has read yet."""

    messages: Messages
    generation: Generation

    def read(self) -> Answer:
        answer = Answer(self.messages)
        while events := self.generation.get(PATIENCE):
            for event in events:
                answer.take(event)
        return answer


@dataclass(frozen=True)
class Judge:
    """Holds answers against the reference, each token after the answer's own tokens before it."""

    reference: NumpyLlama
    tokenizer: Any
    """transformers' own, which renders the template without any code of this project."""

    def prompt(self, messages: Messages) -> list[int]:
        given = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return list(given["input_ids"])

    def check(
        self,
        messages: Messages,
        tokens: Sequence[int],
        logprobs: Sequence[float | None] = (),
        *,
        stopped: bool = False,
        gap: float = GAP,
        tolerance: float = TOLERANCE,
    ) -> None:
        """Each token is the reference's best, or within `gap` of it; so is the end."""
        assert tokens
        prompt = self.prompt(messages)
        found = self.reference.logprobs([*prompt, *tokens], start=len(prompt) - 1)
        drawn = [*tokens, self.tokenizer.eos_token_id] if stopped else tokens
        for at, token in enumerate(drawn):
            short = found[at].max() - found[at, token]
            assert short < gap, (at, self.tokenizer.decode(tokens[:at]), token, found[at].argmax())
        for at, (token, logprob) in enumerate(zip(tokens, logprobs, strict=False)):
            assert logprob is not None
            assert abs(logprob - found[at, token]) < tolerance, (at, token)

    def check_answer(self, answer: Answer, **limits: float) -> None:
        values = [each.logprob for each in answer.logprobs]
        stopped = answer.reason == "stop"
        self.check(answer.messages, answer.tokens, values, stopped=stopped, **limits)
        assert answer.text == self.tokenizer.decode(answer.tokens, skip_special_tokens=True)
