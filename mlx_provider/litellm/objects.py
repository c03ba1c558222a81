"""The chunks and responses of `wire.openai` as LiteLLM's objects.

Rules of streams (1.106.2, `CustomStreamWrapper`): usage comes before a finish chunk, which contains
nothing else. The finish of choice 0 ends the stream, so it comes last. The finish of another choice
is the second entry beside an empty choice 0."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from litellm.types import utils as types

from ..protocol.events import Done, Event, Failed
from ..wire.api import HEADER, header_text
from ..wire.openai.answer import ALWAYS_EMPTY, ChunkChoices, usage_of
from ..wire.openai.request import AnswerForm

TEXT_LISTS = "text_lists"
"""Attribute by which `patches` knows `TextLogprobs`: this module may be imported twice."""


class TextLogprobs(types.ChoiceLogprobs):
    """Of a text completion; `patches` copies them past LiteLLM's conversion from chat."""

    text_lists: dict[str, Any]


class TextFinish(types.ModelResponseStream):
    """The finish of a choice beside an empty choice 0. LiteLLM's text stream reads the first choice
    by item, its chat stream by attribute, where a finish would end the stream (1.109.1)."""

    def __getitem__(self, key: str) -> Any:
        return self.choices[1:] if key == "choices" else getattr(self, key)


class ChunkStream:
    def __init__(
        self,
        reply_id: str,
        model: str,
        created: int,
        form: AnswerForm = AnswerForm(),  # noqa: B008  (frozen)
    ) -> None:
        self._head = {"id": f"chatcmpl-{reply_id}", "created": created, "model": model}
        self._form = form
        self._choices = ChunkChoices(form)
        self._finish: dict[str, Any] | None = None
        self.ended = False

    def feed(self, events: Iterable[Event]) -> Iterator[types.ModelResponseStream]:
        for event in events:
            for choice in self._choices.of(event):
                yield from self._chunks(choice)
            if isinstance(event, Done):
                self.ended = True
                finish = self._finish or self._choices.choice(reason="stop")
                usage = types.Usage(**usage_of(event, timings=self._form.timings))
                yield self._chunk(_streaming(finish), usage=usage)
                end = types.StreamingChoices(index=0, finish_reason=finish["finish_reason"])
                yield self._chunk(end)
            elif isinstance(event, Failed):
                self.ended = True
                raise event.error.exception()

    def empty(self) -> types.ModelResponseStream:
        return self._chunk(_streaming(self._choices.choice(0, {"content": ""})))

    def _chunks(self, choice: dict[str, Any]) -> Iterator[types.ModelResponseStream]:
        reason, index = choice["finish_reason"], choice["index"]
        if reason is None:
            yield self._chunk(_streaming(choice))
        elif index == 0:
            self._finish = choice
        else:
            kind = TextFinish if self._form.text else types.ModelResponseStream
            first, delta = types.StreamingChoices(index=0), types.Delta(content="")
            other = types.StreamingChoices(index=index, finish_reason=reason, delta=delta)
            yield kind(choices=[first, other], **self._head)

    def _chunk(self, choice: types.StreamingChoices, **more: Any) -> types.ModelResponseStream:
        return types.ModelResponseStream(choices=[choice], **self._head, **more)


def _streaming(choice: Mapping[str, Any]) -> types.StreamingChoices:
    logprobs: Any = choice["logprobs"]
    if "delta" in choice:
        delta = choice["delta"]
        logprobs = logprobs and types.ChoiceLogprobs(**logprobs)
    else:
        delta = {"content": choice["text"] if choice["finish_reason"] is None else None}
        logprobs = logprobs and TextLogprobs(text_lists=logprobs)
    return types.StreamingChoices(
        index=choice["index"], delta=types.Delta(**delta), logprobs=logprobs
    )


def fill(
    response: Any, model: str, body: Mapping[str, Any], done: Done, warnings: Sequence[str]
) -> Any:
    """LiteLLM's conversion of chat to text drops log-probabilities (1.106.2,
    `convert_chat_to_text_completion`), but does not change a text completion."""
    usage, timings = types.Usage(**body["usage"]), done.timings.model_dump()
    if body["object"] == "list":
        response.data = [types.Embedding(**each) for each in body["data"]]
        response.model, response.usage = model, usage
        _add_headers(response, warnings, {})
        return response
    rate = {"x-mlx-tokens-per-second": f"{timings['tokens_per_second']:.1f}"}
    hidden = _add_headers(response, warnings, rate)
    hidden["timings"] = timings
    if body["object"] != "text_completion":
        response.choices = [_choice(choice) for choice in body["choices"]]
        response.model, response.usage, response.timings = model, usage, timings
        return response
    choices = [types.TextChoices(**choice) for choice in body["choices"]]
    head = {"id": response.id, "created": response.created, "model": model}
    text = types.TextCompletionResponse(**head, choices=choices, usage=usage)
    text._hidden_params = hidden  # noqa: SLF001  (where LiteLLM takes headers from)
    return text


def _choice(choice: Mapping[str, Any]) -> types.Choices:
    message, logprobs = choice["message"], choice["logprobs"]
    return types.Choices(
        index=choice["index"],
        finish_reason=choice["finish_reason"],
        message=types.Message(
            **{name: message[name] for name in message if name not in ALWAYS_EMPTY}
        ),
        logprobs=logprobs and types.ChoiceLogprobs(**logprobs),
    )


def _add_headers(
    response: Any, warnings: Sequence[str], headers: Mapping[str, str]
) -> dict[str, Any]:
    warned = {HEADER: header_text(warnings)} if warnings else {}
    hidden: dict[str, Any] = response._hidden_params  # noqa: SLF001
    known = hidden.get("additional_headers") or {}
    hidden["additional_headers"] = {**known, **headers, **warned}
    return hidden
