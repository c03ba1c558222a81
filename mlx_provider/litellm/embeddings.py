"""`/embeddings`: OpenAI's parameters as one request, the engine's vectors as OpenAI's objects."""

from __future__ import annotations

import sys
from array import array
from base64 import b64decode
from collections.abc import Iterable
from typing import Any

from litellm.types.utils import Embedding, EmbeddingResponse
from pydantic import ValidationError

from ..errors import BadRequest
from ..invalid import bad_request
from ..protocol.events import Accepted, Done, Embedded, Event, Failed
from ..protocol.requests import EmbedRequest
from .call import Call
from .completions import listed
from .messages import with_headers
from .operator import Caller, chosen_by, engine_options, operator_options, tenant
from .parameters import Parameters
from .replies import usage_of

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


class Vectors:
    """See `streams.Collects`."""

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
                self._found.append(self._shaped(event))
            elif isinstance(event, Done):
                self._done = event
            elif isinstance(event, Failed):
                raise event.error.exception()

    def _shaped(self, event: Embedded) -> Embedding:
        vector = event.vector if self._form == "base64" else numbers(event.vector)
        return Embedding(embedding=vector, index=event.index, object="embedding")

    def fill(self, response: EmbeddingResponse, model: str) -> EmbeddingResponse:
        assert self._done is not None  # noqa: S101  (a caller's mistake, not an input's)
        response.data = sorted(self._found, key=lambda each: each.index)
        response.model = model
        response.usage = usage_of(self._done)
        with_headers(response, self._accepted.warnings, {})
        return response


def numbers(vector: str) -> list[float]:
    """The float32 values of a vector in base64."""
    found = array("f", b64decode(vector))
    if sys.byteorder == "big":
        found.byteswap()
    return found.tolist()
