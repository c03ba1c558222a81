"""Converts vectors of the engine to LiteLLM's response."""

from __future__ import annotations

from collections.abc import Iterable

from litellm.types.utils import Embedding, EmbeddingResponse

from ..protocol.events import Accepted, Done, Embedded, Event, Failed
from ..wire.openai.embed import embedding_of
from .messages import with_headers
from .replies import usage_of


class Vectors:
    def __init__(self, accepted: Accepted, form: str) -> None:
        self._accepted = accepted
        self._form = form
        self._found: list[Embedding] = []
        self._done: Done | None = None

    @property
    def ended(self) -> bool:
        return self._done is not None

    def feed(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Embedded):
                self._found.append(Embedding(**embedding_of(event, self._form)))
            elif isinstance(event, Done):
                self._done = event
            elif isinstance(event, Failed):
                raise event.error.exception()

    def fill(self, response: EmbeddingResponse, model: str) -> EmbeddingResponse:
        assert self._done is not None  # noqa: S101  (a caller's mistake, not an input's)
        response.data = sorted(self._found, key=lambda each: each.index)
        response.model = model
        response.usage = usage_of(self._done)
        with_headers(response, self._accepted.warnings, {})
        return response
