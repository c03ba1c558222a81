"""Parameters of embeddings to the engine's request, and vectors in the form of the client.

The routes of OpenAI's API: from a body to a request.
"""

from __future__ import annotations

import sys
from array import array
from base64 import b64decode
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import ValidationError

from ...errors import BadRequest
from ...invalid import bad_request
from ...protocol.events import Accepted, Done, Embedded
from ...protocol.requests import EmbedRequest
from ..body import Asked, Read
from ..replies import Results
from .answer import usage_of
from .parameters import Parameters, names_of
from .prompts import AnswerForm, listed
from .request import generate_requests
from .stream import Stream, Whole

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


ALWAYS = ("add_special_tokens", "add_generation_prompt")


def _completion(
    body: dict[str, Any], sender: Mapping[str, Any], *, text: bool, content: str
) -> Asked:
    given = body.pop(content, None)
    if text:
        given = listed(given, content)
    form = AnswerForm.of(body, text=text)
    streamed, usage = _streamed(body)
    places = names_of(body, content)
    with places.naming():
        requests = generate_requests(_parameters(body), _named(body, sender), given, form)
    reply = partial(Stream, form=form, usage=usage) if streamed else partial(Whole, form=form)
    return Asked(requests, reply, places=places)


def _tokenize(body: dict[str, Any], sender: Mapping[str, Any]) -> Asked:
    """With the parameters of the request whose prompt is meant, as in vLLM."""
    own = Parameters({name: body.pop(name, None) for name in ALWAYS})
    for name in ALWAYS:
        own.choice(name, (True,), "the prompt is what a request would have")
    text = "messages" not in body
    return _completion(body, sender, text=text, content="prompt" if text else "messages")


def _detokenize(body: dict[str, Any], sender: Mapping[str, Any]) -> Asked:
    return _completion(body, sender, text=True, content="tokens")


def _embeddings(body: dict[str, Any], sender: Mapping[str, Any]) -> Asked:
    given = body.pop("input", None)
    request, form = embed_request(_parameters(body), _named(body, sender), given)
    return Asked([request], partial(Results, body=partial(embeddings, form=form)))


def _parameters(body: Mapping[str, Any]) -> Parameters:
    return Parameters({name: value for name, value in body.items() if name != "model"})


def _named(body: Mapping[str, Any], sender: Mapping[str, Any]) -> dict[str, Any]:
    return {**sender, "model": body.get("model")}


def _streamed(body: Mapping[str, Any]) -> tuple[bool, bool]:
    params = Parameters(body)
    streamed = params.flag("stream") or False
    return streamed, params.mapping("stream_options").get("include_usage") is True


GENERATE: Mapping[str, Read] = {
    "/v1/chat/completions": partial(_completion, text=False, content="messages"),
    "/v1/completions": partial(_completion, text=True, content="prompt"),
    "/v1/embeddings": _embeddings,
}
ROUTES: Mapping[str, Read] = {**GENERATE, "/tokenize": _tokenize, "/detokenize": _detokenize}
