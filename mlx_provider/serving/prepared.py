"""Converts a client's request to the engine's: prompt, grammar, sampling, rows."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from ..chat.media.room import MediaClaim
from ..engine.request import Request, SamplingParams
from ..errors import BadRequest
from ..protocol.event_queue import EventQueue
from ..protocol.events import Accepted
from ..protocol.requests import GenerateRequest
from ..records import ModelInfo, Prompt, ShowsLogits
from .grants import account
from .model_view import ModelView
from .prompt import Turn, prepare, prompt_text, taken_media
from .rows import make_row
from .structure import Form, form_of
from .validate import checked, room_for


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
