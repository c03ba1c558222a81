"""Reads the reply to one accepted request as LiteLLM's objects: whole or as a stream, blocking or
in an event loop. Streams are classes: a generator that was never started runs no `finally`."""

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

from litellm.types import utils as types

from ..client.generation import Generation
from ..errors import EngineDied, RequestTimedOut
from ..protocol.events import Done, Event, Failed, Finish
from ..wire import api
from ..wire.api import HEADER, ClientNames, header_text
from ..wire.openai.answer import ALWAYS_EMPTY, ChunkChoices, WholeResponse, usage_of
from ..wire.openai.routes import EmbeddingsResponse
from .call import Deadline
from .errors import LiteLLMErrors

SILENCE = 5.0  # seconds before a heartbeat
EMPTY = types.StreamingChoices()  # to copy
TEXT_LISTS = "text_lists"
"""Attribute by which `patches` knows `TextLogprobs`: this module may be imported twice."""


class TextLogprobs(types.ChoiceLogprobs):
    """Those of a text completion; `patches` copies them past LiteLLM's conversion from chat."""

    text_lists: dict[str, Any]


class OurLogprobs(types.ChoiceLogprobs):
    """Marks log-probabilities made here, so that `patches` copies only these."""

    made_here: ClassVar[bool] = True


class QuickDelta(types.Delta):
    """Misses absent attributes faster than pydantic: LiteLLM reads some thirty of each delta."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattr__(name)
        if name in self.__pydantic_extra__:
            return self.__pydantic_extra__[name]
        raise AttributeError(name)


class TextFinish(types.ModelResponseStream):
    """The finish of a choice beside an empty choice 0. LiteLLM's text stream reads the first choice
    by item, its chat stream by attribute, where a finish would end the stream (1.109.1)."""

    def __getitem__(self, key: str) -> Any:
        return self.choices[1:] if key == "choices" else getattr(self, key)


class ChunkStream:
    """Events as chunks by LiteLLM's rules (1.106.2, `CustomStreamWrapper`): usage comes before a
    finish chunk, which contains nothing else. The finish of choice 0 ends the stream, so it comes
    last. The finish of another choice is the second entry beside an empty choice 0."""

    def __init__(self, reply_id: str, model: str, created: int, *, text: bool = False) -> None:
        self._head = {"id": f"chatcmpl-{reply_id}", "created": created, "model": model}
        self._text = text
        self._choices = ChunkChoices(text=text)
        self._finish: dict[str, Any] | None = None
        self.ended = False

    def feed(self, events: Iterable[Event]) -> Iterator[types.ModelResponseStream]:
        """The chunks for these events. Raises the error of `Failed`."""
        for event in events:
            for choice in self._choices.of(event):
                yield from self._chunks(choice)
            if isinstance(event, Done):
                self.ended = True
                finish = self._finish or self._choices.choice(reason="stop")
                yield self._chunk(_streaming(finish), usage=types.Usage(**usage_of(event)))
                end = types.StreamingChoices(index=0, finish_reason=finish["finish_reason"])
                yield self._chunk(end)
            elif isinstance(event, Failed):
                self.ended = True
                raise event.error.exception()

    def empty(self) -> types.ModelResponseStream:
        """A chunk without content: a heartbeat."""
        return self._chunk(_streaming(self._choices.choice(0, {"content": ""})))

    def _chunks(self, choice: dict[str, Any]) -> Iterator[types.ModelResponseStream]:
        reason, index = choice["finish_reason"], choice["index"]
        if reason is None:
            yield self._chunk(_streaming(choice))
        elif index == 0:
            self._finish = choice
        else:
            kind = TextFinish if self._text else types.ModelResponseStream
            first, delta = types.StreamingChoices(index=0), types.Delta(content="")
            other = types.StreamingChoices(index=index, finish_reason=reason, delta=delta)
            yield kind(choices=[first, other], **self._head)

    def _chunk(self, choice: Any, usage: Any = None) -> types.ModelResponseStream:
        # if `usage` is absent, LiteLLM looks for it in other places
        return types.ModelResponseStream(choices=[choice], usage=usage, **self._head)


def _streaming(choice: Mapping[str, Any]) -> types.StreamingChoices:
    logprobs: Any = choice["logprobs"]
    if "delta" in choice:
        delta = choice["delta"]
        logprobs = logprobs and OurLogprobs(**logprobs)
    else:
        delta = {"content": choice["text"] if choice["finish_reason"] is None else None}
        logprobs = logprobs and TextLogprobs(text_lists=logprobs)
    fields = {"index": choice["index"], "delta": QuickDelta(**delta), "logprobs": logprobs}
    return EMPTY.model_copy(update=fields)  # a fifth of the time of a new one


def fill(
    response: Any, model: str, body: Mapping[str, Any], done: Done, warnings: Sequence[str]
) -> Any:
    """Return LiteLLM's `response` with the reply `body`. For a text completion, make a new object:
    LiteLLM's conversion drops log-probabilities (1.106.2, `convert_chat_to_text_completion`)."""
    usage = types.Usage(**body["usage"])
    if body["object"] == "list":
        response.data = [types.Embedding(**vector) for vector in body["data"]]
        response.model, response.usage = model, usage
        _add_headers(response, warnings, {})
        return response
    rate = {"x-mlx-tokens-per-second": f"{done.timings.tokens_per_second:.1f}"}
    hidden = _add_headers(response, warnings, rate)
    if body["object"] != "text_completion":
        for choice in body["choices"]:
            for name in ALWAYS_EMPTY:
                del choice["message"][name]
            if choice["logprobs"]:
                choice["logprobs"] = OurLogprobs(**choice["logprobs"])
        response.choices = [types.Choices(**choice) for choice in body["choices"]]
        response.model, response.usage = model, usage
        return response
    choices = [types.TextChoices(**choice) for choice in body["choices"]]
    head = {"id": response.id, "created": response.created, "model": model}
    text = types.TextCompletionResponse(**head, choices=choices, usage=usage)
    text._hidden_params = hidden  # noqa: SLF001  (where LiteLLM takes headers from)
    return text


def _add_headers(
    response: Any, warnings: Sequence[str], headers: Mapping[str, str]
) -> dict[str, Any]:
    warned = {HEADER: header_text(warnings)} if warnings else {}
    hidden: dict[str, Any] = response._hidden_params  # noqa: SLF001
    known = hidden.get("additional_headers") or {}
    hidden["additional_headers"] = {**known, **headers, **warned}
    return hidden


class OpenRequest(LiteLLMErrors):
    """An accepted request in the engine. A `with` block also cancels it after any exception."""

    def __init__(
        self,
        generation: Generation,
        deadline: Deadline,
        model: str,
        names: ClientNames | None = None,
        finished: Callable[[Finish], None] | None = None,
        encoding: str | None = None,
        *,
        text: bool = False,
    ) -> None:
        """`names`: the client's names of parameters, for a late error. `finished` is called when
        the first choice ends. `encoding`: of vectors; `None`: the reply is a text."""
        super().__init__(model)
        self.generation = generation
        self.deadline = deadline
        self.text = text
        self._names = names or ClientNames()
        self._finished = finished
        self._encoding = encoding

    def collect(self, response: Any) -> Any:
        """Wait for the whole reply. Returns LiteLLM's `response` with it, as `fill` does."""
        with self:
            whole, body = self._whole(), None
            while body is None:
                body = whole.body(events := self.events())
            return self._fill(response, body, events[-1])

    async def acollect(self, response: Any) -> Any:
        with self:
            whole, body = self._whole(), None
            while body is None:
                body = whole.body(events := await self.aevents())
            return self._fill(response, body, events[-1])

    def _whole(self) -> api.WholeResponse:
        accepted = self.generation.accepted
        if self._encoding is None:
            return WholeResponse(accepted, text=self.text)
        return EmbeddingsResponse(accepted, self._encoding)

    def _fill(self, response: Any, body: Mapping[str, Any], done: Any) -> Any:
        return fill(response, self.model, body, done, self.generation.accepted.warnings)

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        if error is not None:
            self.generation.close()
            super().__exit__(kind, error, frames)

    def events(self) -> list[Event]:
        """Wait for events. Raises `RequestTimedOut` at the deadline, `EngineDied` past the end."""
        try:
            return self._read(self.generation.get(self.deadline.remaining()))
        except RequestTimedOut:
            raise self.deadline.error() from None

    async def aevents(self, silence: float | None = None) -> list[Event]:
        """As `events`; an empty list after `silence` seconds without an event."""
        left = self.deadline.remaining()
        within = min((seconds for seconds in (left, silence) if seconds is not None), default=None)
        try:
            return self._read(await self.generation.aget(within))
        except RequestTimedOut:
            if within == left:
                raise self.deadline.error() from None
            return []

    def _read(self, events: list[Event]) -> list[Event]:
        if not events:
            raise EngineDied("the engine ended the stream early")
        for event in events:
            if self._finished is not None and isinstance(event, Finish) and event.index == 0:
                self._finished(event)
        return self._names.events(events)


class ResponseStream:
    """LiteLLM's chunks of a reply. Errors are LiteLLM's; each frees the request, as does the
    cancellation of a reader. In a loop, an empty chunk comes after `heartbeat` silent seconds."""

    def __init__(self, request: OpenRequest, heartbeat: float | None = None) -> None:
        self._request = request
        self._heartbeat = heartbeat
        self.mlx_created = int(time.time())  # `patches.CREATED`: marks our streams, dates chunks
        self._chunks = ChunkStream(
            request.generation.accepted.id, request.model, self.mlx_created, text=request.text
        )
        self._waiting: Iterator[types.ModelResponseStream] = iter(())
        self._closed = False

    def __iter__(self) -> Self:
        return self

    __aiter__ = __iter__

    def __next__(self) -> types.ModelResponseStream:
        with self._request:
            while (chunk := self._ready(StopIteration)) is None:
                self._waiting = self._chunks.feed(self._request.events())
            return chunk

    async def __anext__(self) -> types.ModelResponseStream:
        with self._request:
            while (chunk := self._ready(StopAsyncIteration)) is None:
                events = await self._request.aevents(self._heartbeat)
                if not events:
                    return self._chunks.empty()
                self._waiting = self._chunks.feed(events)
            return chunk

    def _ready(self, end: type[Exception]) -> types.ModelResponseStream | None:
        chunk = next(self._waiting, None)
        if chunk is None and (self._closed or self._chunks.ended):
            raise end
        return chunk

    def close(self) -> None:
        self._closed = True
        self._waiting = iter(())
        self._request.generation.close()

    async def aclose(self) -> None:
        self.close()


async def refuse(error: Exception) -> AsyncGenerator[Any, None]:
    """A stream that only raises `error`."""
    raise error
    yield  # makes it a generator
