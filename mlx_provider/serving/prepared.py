"""Converts a client's request to the engine's: prompt or inputs, grammar, sampling, rows."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..bounds import MAX_INPUT_TOKENS
from ..chat.media.load import MediaClaim
from ..engine.inputs import Inputs
from ..engine.request import Request, Row, SamplingParams
from ..errors import BadRequest, ContextTooLong, wrong_part
from ..protocol.event_queue import EventQueue
from ..protocol.events import Accepted, Delta, FinishReason, TokenLogprob
from ..protocol.requests import EmbedRequest, GenerateRequest
from ..records import Embedding, HiddenStatesModel, ModelInfo, Pooling, Prompt, PromptLogitsModel
from .permissions import tenant
from .prompt import HostWork, media_support, prompt_text, render_prompt
from .structure import Form, form_of, make_row
from .weights import ModelView


def prepare_generation(
    wire: GenerateRequest,
    view: ModelView,
    queue: EventQueue,
    media: MediaClaim,
    arrived: float,
    host_work: HostWork,
) -> tuple[Request, Accepted]:
    """Render, tokenise, compile the grammar (any thread), in turns of `host_work`. Returns the
    engine's request and the client's first event. `media` is charged with the images. `arrived`:
    monotonic seconds. Raises `BadRequest` that names the part, `ContextTooLong`, `Overloaded`."""
    rendered = render_prompt(view, wire, media, host_work)
    prompt = rendered.prompt
    check_prompt(wire, prompt, view.info)
    if wire.echo and wire.logprobs and not isinstance(view.model, PromptLogitsModel):
        problem = f"family {view.weights.family!r} does not tell how likely prompt tokens were"
        raise wrong_part("logprobs", f"{problem}; leave out echo", " with echo:")
    with host_work():
        form = form_of(view, wire, prompt.text)
    request = _request(wire, prompt, form, view, queue, arrived)
    accepted = Accepted(
        id=wire.id,
        model=wire.model,
        prompt_tokens=len(prompt.tokens),
        max_tokens=request.max_tokens,
        context_length=view.info.context_length,
        vision="image" in media_support(view.info, wire.options).kinds,
        reasoning=view.reasoning_parser is not None,
        temperature=request.params.temperature,
        top_p=request.params.top_p,
        echo=prompt_text(view, prompt) if wire.echo else "",
        warnings=[*rendered.warnings, *form.warnings, *_without_effect(wire.ignored)],
    )
    return request, accepted


def check_prompt(request: GenerateRequest, prompt: Prompt, info: ModelInfo) -> None:
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
    """Most tokens of each choice: `max_tokens`, clipped to the rest of the context."""
    room = info.context_length - len(prompt.tokens)
    return room if request.max_tokens is None else min(request.max_tokens, room)


def within_vocabulary(tokens: Iterable[int], vocab_size: int, param: str) -> None:
    """Raise `BadRequest` that names `param` for a token id that is not in the vocabulary."""
    # MLX's gather does not check indices: an invalid id would read other memory
    for token in tokens:
        if not 0 <= token < vocab_size:
            problem = f"token id {token} is not within 0 .. {vocab_size - 1}, the vocabulary"
            raise wrong_part(param, problem, ":")


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
        tenant=tenant(wire),
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
    of_model = vars(info.sampling).items()
    values: dict[str, Any] = {name: value for name, value in of_model if value is not None}
    values |= wire.sampling.model_dump(exclude_none=True)
    values["top_k"] = max(0, int(values.get("top_k", 0)))
    values["logit_bias"] = tuple(values["logit_bias"].items())
    return SamplingParams(**{"seed": secrets.randbits(63), **values})


def prepare_embedding(
    wire: EmbedRequest,
    view: ModelView,
    queue: EventQueue,
    arrived: float,
    check_wanted: Callable[[], None],
) -> tuple[Request, Accepted]:
    """Tokenise (host work, any thread). Returns the same as `prepare_generation`. `check_wanted` is
    called before each input, and raises if nobody waits any more. `arrived`: monotonic seconds.
    Raises `BadRequest` that names the part, `ContextTooLong`."""
    embedding, pooling = _check_embedding(view)
    prefix = _input_prefix(embedding, wire.prompt_name)
    tokens = _tokenize_inputs(wire, view, prefix, check_wanted)
    inputs = Inputs(tokens, pooling, _dimensions(embedding, wire.dimensions), embedding.normalise)
    request = Request(
        id=wire.id,
        prompt=inputs.longest,
        params=SamplingParams(),
        max_tokens=0,
        events=queue,
        salt=wire.namespace,
        tenant=tenant(wire),
        share=wire.share,
        drafts=False,
        may_skip=False,
        inputs=inputs,
        deadline=arrived + wire.timeout if wire.timeout else None,
        arrived=arrived,
    )
    request.rows = [Row(request, 0, NoText())]
    accepted = Accepted(
        id=wire.id,
        model=wire.model,
        prompt_tokens=inputs.total,
        max_tokens=0,
        context_length=view.info.context_length,
        warnings=_without_effect(wire.ignored),
    )
    return request, accepted


def _without_effect(parameters: Iterable[str]) -> list[str]:
    return [f"{name} has no effect" for name in parameters]


def _check_embedding(view: ModelView) -> tuple[Embedding, Pooling]:
    """How the model embeds, and its pooling. Raises `BadRequest` if it cannot."""
    embedding = view.info.embedding
    refusal = embedding.refusal
    if not isinstance(view.model, HiddenStatesModel):
        refusal = f"family {view.weights.family!r} shows no hidden states"
    if refusal:
        raise BadRequest(f"{view.name} cannot embed: {refusal}", param="model")
    if embedding.pooling is None:
        raise BadRequest(
            f"{view.name} does not say how its states become a vector (it has no "
            "1_Pooling/config.json): name an embedding model, or let the operator choose "
            "model_info.mlx.pooling, one of last, mean and cls",
            param="model",
        )
    return embedding, embedding.pooling


def _input_prefix(embedding: Embedding, name: str | None) -> str:
    """The text that goes before each input: the model's prompt of that name, or its default."""
    prompts = embedding.prompts
    if name is None:
        return prompts.get(embedding.default_prompt, "")
    if name not in prompts:
        known = ", ".join(sorted(prompts)) or "none"
        problem = f"this model has no prompt {name[:80]!r}, it has: {known}"
        raise wrong_part("prompt_name", problem, ":")
    return prompts[name]


def _dimensions(embedding: Embedding, wanted: int | None) -> int:
    if wanted is not None and wanted > embedding.width:
        limit = f"at most {embedding.width}, which this model's vectors have"
        raise wrong_part("dimensions", f"must be {limit}, got {wanted}")
    return wanted or embedding.width


def _tokenize_inputs(
    wire: EmbedRequest, view: ModelView, prefix: str, check_wanted: Callable[[], None]
) -> list[array[int]]:
    """Raises `BadRequest` that names the input, `ContextTooLong`."""
    limit = view.info.context_length
    tokenised: list[array[int]] = []
    total = 0
    for index, content in enumerate(wire.input):
        check_wanted()
        where = f"input[{index}]"
        try:
            tokens = array("i", _tokens_of(content, view, prefix, where))
        except BadRequest as error:
            reason = error.message.removeprefix(f"{where}: ")
            raise type(error)(f"{where}: {reason}", param=where) from None
        if len(tokens) >= limit:
            raise ContextTooLong(
                f"{where} is too long: {len(tokens)} tokens > {limit - 1} maximum (context "
                f"of {limit}): divide it",
                param=where,
            )
        total += len(tokens)
        if total > MAX_INPUT_TOKENS:
            problem = f"more than {MAX_INPUT_TOKENS} tokens: send it in several requests"
            raise wrong_part("input", problem, ":")
        tokenised.append(tokens)
    return tokenised


def _tokens_of(content: str | list[int], view: ModelView, prefix: str, where: str) -> Sequence[int]:
    if not content:
        raise BadRequest("it is empty")
    if isinstance(content, str):
        return view.model.tokenizer.encode_plain(content, before=prefix, special=True)
    within_vocabulary(content, view.info.vocab_size, where)
    return content


@dataclass
class NoText:
    """The `RowOutput` of a row that writes no reply."""

    stopped: str = ""
    reasoning_tokens: int = 0

    def push(self, token: int, logprob: TokenLogprob | None = None) -> list[Delta]:
        return []

    def finish(self, reason: FinishReason) -> tuple[list[Delta], FinishReason]:
        return [], reason
