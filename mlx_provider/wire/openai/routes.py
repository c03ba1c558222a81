"""The routes of OpenAI's API, except Responses, and vLLM's `/tokenize`: how each reads a body, and
the response of `/v1/embeddings`. Parameters are in `request.py`, responses with a reply in
`answer.py`. The server itself makes those of `/tokenize` and `/detokenize`."""

from base64 import b64decode
from collections.abc import Mapping, Sequence
from functools import partial
from struct import unpack
from typing import Any

from pydantic import ValidationError

from ...errors import wrong_part
from ...invalid import bad_request, quote
from ...protocol.events import Accepted, Done, Embedded, Event
from ...protocol.requests import EmbedRequest
from .. import api
from ..api import Fields, ParsedRequest, Read
from .answer import Stream, WholeResponse, usage_of
from .request import Parameters, generate_requests, is_token_list, parameter_names, prompt_list

FORMATS = ("float", "base64")  # of vectors
TEXT_ONLY_TRUE = ("add_special_tokens", "add_generation_prompt")
CHAT_ONLY_TRUE = ("add_special_tokens",)
"""Parameters of `/tokenize` that must be true, as by default: with a prompt, and with messages."""


def _read_generation(
    body: dict[str, Any], sender: Fields, *, text: bool, content_name: str
) -> ParsedRequest:
    """A request of text completions (`text`) or of chat. `content_name`: the parameter with the
    prompts or messages. `sender`: fields of the request that do not come from the body."""
    content = body.pop(content_name, None)
    if text:
        content = prompt_list(content, content_name)
    params = Parameters(body)
    streamed = params.flag("stream")
    usage = params.mapping("stream_options").get("include_usage") is True
    names = parameter_names(body, content_name)
    with names.naming():
        requests = generate_requests(params, sender, content, text=text)
    kind = partial(Stream, usage=usage) if streamed else WholeResponse
    reply = partial(kind, text=text)
    return ParsedRequest(requests, reply, names)


def _read_tokenize(body: dict[str, Any], sender: Fields) -> ParsedRequest:
    """The body is a request of chat or text completions, as in vLLM; its prompt is tokenized."""
    text = "messages" not in body
    only_true = TEXT_ONLY_TRUE if text else CHAT_ONLY_TRUE
    params = Parameters({name: body.pop(name, None) for name in only_true})
    for name in only_true:
        params.choice(name, (True,), "the prompt is what a request would have")
    return _read_generation(body, sender, text=text, content_name="prompt" if text else "messages")


def _read_detokenize(body: dict[str, Any], sender: Fields) -> ParsedRequest:
    if not is_token_list(tokens := body.get("tokens")):
        raise wrong_part("tokens", f"must be a list of token ids, not empty, got {quote(tokens)}")
    return _read_generation(body, sender, text=True, content_name="tokens")


def _read_embeddings(body: dict[str, Any], sender: Fields) -> ParsedRequest:
    given = body.pop("input", None)
    request, encoding = embed_request(Parameters(body), sender, given)
    return ParsedRequest([request], partial(EmbeddingsResponse, encoding=encoding))


def embed_request(params: Parameters, sender: Fields, given: Any) -> tuple[EmbedRequest, str]:
    """The request and the encoding of its vectors, one of `FORMATS`. `given`: the texts or tokens
    to embed. Raises `BadRequest` for a wrong or unknown parameter."""
    encoding = params.take("encoding_format", "float")
    if encoding not in FORMATS:
        raise wrong_part("encoding_format", f"must be float or base64, got {quote(encoding)}")
    params.take("user")  # has no effect
    fields: dict[str, Any] = {
        **sender,
        "input": prompt_list(given, "input"),
        "dimensions": params.take("dimensions"),
        "prompt_name": params.take("prompt_name"),
        "ignored": params.take_ignored(),
    }
    params.refuse_rest()
    try:
        return EmbedRequest.model_validate(fields), encoding
    except ValidationError as error:
        raise bad_request(error, EmbedRequest) from None


class EmbeddingsResponse(api.WholeResponse):
    """The vectors in the encoding, one of `FORMATS`."""

    def __init__(self, accepted: Accepted, encoding: str) -> None:
        self._model = accepted.model
        self._encoding = encoding

    def _body(self, events: Sequence[Event], done: Done) -> dict[str, Any]:
        read = str if self._encoding == "base64" else decode_vector  # an event has base64 already
        usage = usage_of(done)
        counts = {name: usage[name] for name in ("prompt_tokens", "total_tokens")}
        vectors = {event.index: event.vector for event in events if isinstance(event, Embedded)}
        data = [
            {"object": "embedding", "index": index, "embedding": read(vectors[index])}
            for index in sorted(vectors)
        ]
        return {"object": "list", "model": self._model, "data": data, "usage": counts}


def decode_vector(vector: str) -> list[float]:
    """The numbers of an `Embedded.vector`."""
    data = b64decode(vector)
    return [*unpack(f"<{len(data) // 4}f", data)]


# By path. `GENERATE`: routes that run a model. `ROUTES`: also those that only convert text.
GENERATE: Mapping[str, Read] = {
    "/v1/chat/completions": partial(_read_generation, text=False, content_name="messages"),
    "/v1/completions": partial(_read_generation, text=True, content_name="prompt"),
    "/v1/embeddings": _read_embeddings,
}
ROUTES: Mapping[str, Read] = {
    **GENERATE,
    "/tokenize": _read_tokenize,
    "/detokenize": _read_detokenize,
}
