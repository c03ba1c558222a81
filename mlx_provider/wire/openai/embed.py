"""Parameters of embeddings to the engine's request, and vectors in the form of the client."""

from __future__ import annotations

import sys
from array import array
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from ...errors import BadRequest
from ...invalid import bad_request
from ...protocol.events import Accepted, Done, Embedded
from ...protocol.requests import EmbedRequest
from .answer import usage_of
from .parameters import Parameters
from .prompts import listed

FORMATS = ("float", "base64")


def embed_request(
    params: Parameters, sender: Mapping[str, Any], given: Any
) -> tuple[EmbedRequest, str]:
    """The request, and its `encoding_format`. Raises `BadRequest` that names the parameter."""
    wanted = params.take("encoding_format") or "float"
    if wanted not in FORMATS:
        raise BadRequest(
            f"encoding_format must be float or base64, got {wanted!r}", param="encoding_format"
        )
    params.take("user")  # nothing is kept for anybody
    fields: dict[str, Any] = {
        **sender,
        "input": listed(given, "input"),
        "dimensions": params.take("dimensions"),
        "prompt_name": params.take("prompt_name"),
        "ignored": params.ignored(),
    }
    params.refuse_rest()
    try:
        return EmbedRequest.model_validate(fields), wanted
    except ValidationError as error:
        raise bad_request(error, EmbedRequest) from None


def embeddings(
    accepted: Accepted, found: Sequence[Any], done: Done, *, form: str
) -> dict[str, Any]:
    usage = usage_of(done)
    return {
        "object": "list",
        "model": accepted.model,
        "data": [embedding_of(each, form) for each in found],
        "usage": {name: usage[name] for name in ("prompt_tokens", "total_tokens")},
    }


def embedding_of(event: Embedded, form: str) -> dict[str, Any]:
    vector = event.vector if form == "base64" else numbers(event.vector)
    return {"object": "embedding", "index": event.index, "embedding": vector}


def numbers(vector: str) -> list[float]:
    """The float32 values of a vector in base64."""
    found = array("f", b64decode(vector))
    if sys.byteorder == "big":
        found.byteswap()
    return found.tolist()
