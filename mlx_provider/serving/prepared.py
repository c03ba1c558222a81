"""Checks that need the model: context, token ids, space for the reply.

Converts a client's request to the engine's: prompt, grammar, sampling, rows.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..chat.media.load import MediaClaim
from ..engine.request import Request, SamplingParams
from ..errors import BadRequest, ContextTooLong
from ..protocol.event_queue import EventQueue
from ..protocol.events import Accepted
from ..protocol.requests import GenerateRequest
from ..records import ModelInfo, Prompt, ShowsLogits
from .grants import account
from .prompt import Turn, prepare, prompt_text, taken_media
from .structure import Form, form_of, make_row
from .weights import ModelView


def checked(request: GenerateRequest, prompt: Prompt, info: ModelInfo) -> None:
    """Raise `BadRequest` or `ContextTooLong` for what this model cannot serve."""
    count = len(prompt.tokens)
    if count == 0:
        raise BadRequest("the prompt is empty", param="prompt")
    if count >= info.context_length:
        raise ContextTooLong.of(count, info.context_length)
    within_vocabulary(prompt.tokens, info.vocab_size, "prompt")
    within_vocabulary(request.stop_token_ids, info.vocab_size, "stop_token_ids")
    within_vocabulary(request.sampling.logit_bias, info.vocab_size, "logit_bias")
    if any(not stop for stop in request.stop):
        raise BadRequest("stop: one of its texts is empty", param="stop")
    if request.min_tokens > room_for(request, prompt, info):
        raise BadRequest("min_tokens is more than max_tokens", param="min_tokens")


def room_for(request: GenerateRequest, prompt: Prompt, info: ModelInfo) -> int:
    """Tokens of each choice: the requested number, clipped to the rest of the context."""
    room = info.context_length - len(prompt.tokens)
    return room if request.max_tokens is None else min(request.max_tokens, room)


def within_vocabulary(tokens: Iterable[int], vocab_size: int, param: str) -> None:
    """Raise `BadRequest` for other token ids."""
    # MLX's gather does not check indices: an invalid id would read other memory
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise BadRequest(
                f"{param}: token id {token} is not within 0 .. {vocab_size - 1}, the vocabulary",
                param=param,
            )


@dataclass(frozen=True)
class Prepared:
    request: Request
    accepted: Accepted


def make_prepared(
    wire: GenerateRequest,
    view: ModelView,
    queue: EventQueue,
    media: MediaClaim,
    arrived: float,
    turn: Turn,
) -> Prepared:
    """Render, tokenise, compile the grammar (host work in turns, any thread). `media` is charged
    with the images; `arrived`: monotonic time. Raises `BadRequest` that names the part,
    `ContextTooLong`, `Overloaded`."""
    rendered = prepare(view, wire, media, turn)
    prompt = rendered.prompt
    checked(wire, prompt, view.info)
    if wire.echo and wire.logprobs and not isinstance(view.model, ShowsLogits):
        raise BadRequest(
            f"logprobs with echo: family {view.weights.family!r} does not tell how likely the "
            "tokens of a prompt were; leave out echo",
            param="logprobs",
        )
    with turn():
        form = form_of(view, wire, prompt.text)
    request = _request(wire, prompt, form, view, queue, arrived)
    accepted = Accepted(
        id=wire.id,
        model=wire.model,
        prompt_tokens=len(prompt.tokens),
        max_tokens=request.max_tokens,
        context_length=view.info.context_length,
        vision="image" in taken_media(view.info, wire.options).kinds,
        reasoning=view.reasoning_parser is not None,
        temperature=request.params.temperature,
        top_p=request.params.top_p,
        echo=prompt_text(view, prompt) if wire.echo else "",
        warnings=[
            *rendered.warnings,
            *form.warnings,
            *(f"{name} has no effect" for name in wire.ignored),
        ],
    )
    return Prepared(request, accepted)


def _request(
    wire: GenerateRequest,
    prompt: Prompt,
    form: Form,
    view: ModelView,
    queue: EventQueue,
    arrived: float,
) -> Request:
    info = view.info
    request = Request(
        id=wire.id,
        prompt=prompt,
        params=_sampling(wire, info),
        max_tokens=room_for(wire, prompt, info),
        events=queue,
        min_tokens=wire.min_tokens,
        stop_tokens=info.stop_tokens | frozenset(wire.stop_token_ids),
        logprobs=wire.top_logprobs if wire.logprobs else None,
        echoed=wire.echo and wire.logprobs,
        drafts=wire.drafts,
        may_skip=wire.sparse_prefill,
        salt=wire.namespace,
        account=account(wire),
        share=wire.share,
        session=wire.session,
        retain=wire.retain,
        deadline=arrived + wire.timeout if wire.timeout else None,
        arrived=arrived,
    )
    request.rows = [make_row(request, i, wire, form, view) for i in range(wire.n)]
    return request


def _sampling(wire: GenerateRequest, info: ModelInfo) -> SamplingParams:
    """Each value from the request, else from the model, else from `SamplingParams`."""
    values: dict[str, Any] = {
        n: value for n, value in vars(info.sampling).items() if value is not None
    }
    values |= wire.sampling.model_dump(exclude_none=True)
    values["top_k"] = max(0, int(values.get("top_k", 0)))
    values["logit_bias"] = tuple(values["logit_bias"].items())
    return SamplingParams(**{"seed": secrets.randbits(63), **values})
