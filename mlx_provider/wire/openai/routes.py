"""The routes of OpenAI's API: from a body to a request."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..asked import Asked, Read
from ..results import Results
from .embed import embed_request, embeddings
from .form import AnswerForm
from .names import names_of
from .parameters import Parameters
from .prompts import listed
from .request import generate_requests
from .stream import Stream
from .whole import Whole

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
