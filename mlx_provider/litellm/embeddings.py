"""`/embeddings`: OpenAI's parameters as one request, the engine's vectors as OpenAI's objects."""

from __future__ import annotations

import sys
from array import array
from base64 import b64decode
from collections.abc import Callable, Iterable
from typing import Any

from litellm.types.utils import Embedding, EmbeddingResponse
from pydantic import ValidationError

from ..client.generation import Generation
from ..errors import BadRequest
from ..invalid import bad_request
from ..protocol.events import Done, Embedded, Event, Failed
from ..protocol.requests import EmbedRequest
from .call import Call
from .completions import listed
from .errors import LiteLLMErrors
from .messages import with_headers
from .operator import Caller, chosen_by, engine_options, operator_options, tenant
from .parameters import Parameters
from .replies import usage_of
from .streams import Held

FORMATS = ("float", "base64")


def embed_request(call: Call, given: Any) -> tuple[EmbedRequest, str]:
    """The request for the engine, and the form in which its client wants vectors.

    Raises `BadRequest` that names the parameter at fault.
    """
    params = Parameters(call.params)
    options = operator_options(call.litellm_params)
    caller = Caller.read(call.litellm_params)
    wanted = params.take("encoding_format") or "float"
    if wanted not in FORMATS:
        raise BadRequest(
            f"encoding_format must be float or base64, got {wanted!r}", param="encoding_format"
        )
    params.take("user")  # nothing is kept for anybody
    fields: dict[str, Any] = {
        "model": call.model,
        "input": listed(given, "input"),
        "dimensions": params.take("dimensions"),
        "prompt_name": params.take("prompt_name"),
        "origin": chosen_by(call.litellm_params, call.model),
        "tenant": tenant(options, caller),
        "options": engine_options(options),
        "timeout": call.deadline.left(),
        "ignored": params.ignored(),
    }
    params.refuse_rest()
    try:
        return EmbedRequest.model_validate(fields), wanted
    except ValidationError as error:
        raise bad_request(error, EmbedRequest) from None


class Vectors(Held):
    """The vectors of one request, while the engine makes them."""

    def __init__(
        self,
        generation: Generation,
        call: Call,
        form: str,
        left: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(generation, call.deadline, call.model, left=left)
        self._form = form
        self._found: list[Embedding] = []
        self._done: Done | None = None

    def collect(self, response: EmbeddingResponse) -> EmbeddingResponse:
        """Read to the end and fill LiteLLM's response."""
        with LiteLLMErrors(self.model), self:
            while self._done is None:
                self._feed(self.events())
            return self._filled(response, self._done)

    async def acollect(self, response: EmbeddingResponse) -> EmbeddingResponse:
        """`collect` in an event loop."""
        with LiteLLMErrors(self.model), self:
            while self._done is None:
                self._feed(await self.aevents())
            return self._filled(response, self._done)

    def _feed(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Embedded):
                self._found.append(self._shaped(event))
            elif isinstance(event, Done):
                self._done = event
            elif isinstance(event, Failed):
                raise event.error.exception()

    def _shaped(self, event: Embedded) -> Embedding:
        vector = event.vector if self._form == "base64" else numbers(event.vector)
        return Embedding(embedding=vector, index=event.index, object="embedding")

    def _filled(self, response: EmbeddingResponse, done: Done) -> EmbeddingResponse:
        self.settle()
        response.data = sorted(self._found, key=lambda each: each.index)
        response.model = self.model
        response.usage = usage_of(done)
        with_headers(response, self.generation.accepted.warnings, {})
        return response


def numbers(vector: str) -> list[float]:
    """The float32 values of a vector in base64."""
    found = array("f", b64decode(vector))
    if sys.byteorder == "big":
        found.byteswap()
    return found.tolist()
