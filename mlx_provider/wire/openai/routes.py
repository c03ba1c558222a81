"""The routes of OpenAI's API, except Responses, and vLLM's `/tokenize`: how each reads a body, and
the response of `/v1/embeddings`. `request` has the parameters, `answer` all other responses."""

import sys
from array import array
from base64 import b64decode
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import ValidationError

from ...errors import wrong_part
from ...invalid import bad_request, quote
from ...protocol.events import Accepted, Done, Embedded, Event
from ...protocol.requests import EmbedRequest
from .. import api
from ..api import Fields, ParsedRequest, Read, expect
from .answer import Stream, WholeResponse, usage_of
from .request import Parameters, generate_requests, parameter_names, prompt_list

FORMATS = ("float", "base64")
ONLY_TRUE = ("add_special_tokens", "add_generation_prompt")


def _read_generation(
    body: dict[str, Any], sender: Fields, *, text: bool, content: str
) -> ParsedRequest:
    given = body.pop(content, None)
    if text:
        given = prompt_list(given, content)
    params = Parameters(body)
    streamed = params.flag("stream")
    usage = params.mapping("stream_options").get("include_usage") is True
    names = parameter_names(body, content)
    with names.naming():
        requests = generate_requests(params, sender, given, text=text)
    kind = partial(Stream, usage=usage) if streamed else WholeResponse
    reply = partial(kind, text=text)
    return ParsedRequest(requests, reply, names)


def _read_tokenize(body: dict[str, Any], sender: Fields) -> ParsedRequest:
    """The body is a request of chat or text completions, as in vLLM; its prompt is tokenized."""
    text = "messages" not in body
    names = ONLY_TRUE if text else ONLY_TRUE[:1]  # chat itself reads the second one
    params = Parameters({name: body.pop(name, None) for name in names})
    for name in names:
        params.choice(name, (True,), "the prompt is what a request would have")
    return _read_generation(body, sender, text=text, content="prompt" if text else "messages")


def _read_detokenize(body: dict[str, Any], sender: Fields) -> ParsedRequest:
    expect(body.get("tokens"), list, "tokens")
    return _read_generation(body, sender, text=True, content="tokens")


def _read_embeddings(body: dict[str, Any], sender: Fields) -> ParsedRequest:
    given = body.pop("input", None)
    request, form = embed_request(Parameters(body), sender, given)
    return ParsedRequest([request], partial(Embeddings, form=form))


def embed_request(params: Parameters, sender: Fields, given: Any) -> tuple[EmbedRequest, str]:
    wanted = params.take("encoding_format") or "float"
    if wanted not in FORMATS:
        raise wrong_part("encoding_format", f"must be float or base64, got {quote(wanted)}")
    params.take("user")  # nothing is kept for anybody
    fields: dict[str, Any] = {
        **sender,
        "input": prompt_list(given, "input"),
        "dimensions": params.take("dimensions"),
        "prompt_name": params.take("prompt_name"),
        "ignored": params.take_ignored(),
    }
    params.refuse_rest()
    try:
        return EmbedRequest.model_validate(fields), wanted
    except ValidationError as error:
        raise bad_request(error, EmbedRequest) from None


class Embeddings(api.WholeResponse):
    def __init__(self, accepted: Accepted, form: str) -> None:
        self._model = accepted.model
        self._form = form

    def _body(self, events: Sequence[Event], done: Done) -> dict[str, Any]:
        read = str if self._form == "base64" else decode_vector  # an event has base64 already
        usage = usage_of(done)
        vectors = {event.index: event.vector for event in events if isinstance(event, Embedded)}
        return {
            "object": "list",
            "model": self._model,
            "data": [
                {"object": "embedding", "index": index, "embedding": read(vectors[index])}
                for index in sorted(vectors)
            ],
            "usage": {name: usage[name] for name in ("prompt_tokens", "total_tokens")},
        }


def decode_vector(vector: str) -> list[float]:
    found = array("f", b64decode(vector))
    if sys.byteorder == "big":
        found.byteswap()
    return found.tolist()


GENERATE: Mapping[str, Read] = {
    "/v1/chat/completions": partial(_read_generation, text=False, content="messages"),
    "/v1/completions": partial(_read_generation, text=True, content="prompt"),
    "/v1/embeddings": _read_embeddings,
}
ROUTES: Mapping[str, Read] = {
    **GENERATE,
    "/tokenize": _read_tokenize,
    "/detokenize": _read_detokenize,
}
