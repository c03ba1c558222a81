"""Converts texts of an embedding request to the engine's inputs."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..bounds import MAX_INPUT_TOKENS
from ..engine.inputs import Inputs
from ..engine.request import Request, Row, SamplingParams
from ..errors import BadRequest, ContextTooLong
from ..protocol.event_queue import EventQueue
from ..protocol.events import Accepted, Delta, FinishReason, TokenLogprob
from ..protocol.requests import EmbedRequest
from ..records import Embedding, Pooling, ShowsHidden
from .grants import account
from .prepared import Prepared, within_vocabulary
from .weights import ModelView


@dataclass
class NoText:
    stopped: str = ""
    reasoning_tokens: int = 0

    def push(self, token: int, logprob: TokenLogprob | None = None) -> list[Delta]:
        return []

    def finish(self, reason: FinishReason) -> tuple[list[Delta], FinishReason]:
        return [], reason


def make_embedding(
    wire: EmbedRequest,
    view: ModelView,
    queue: EventQueue,
    arrived: float,
    check_wanted: Callable[[], None],
) -> Prepared:
    """Tokenise (host work, any thread). `check_wanted` is called before each text; `arrived`:
    monotonic time. Raises `BadRequest` that names the part, `ContextTooLong`."""
    how, pooling = _way(view)
    before = _prompt(how, wire.prompt_name)

    def tokens_of(index: int, where: str) -> Sequence[int]:
        check_wanted()
        return _tokens_of(wire.input[index], view, before, where)

    tokens = _bounded(len(wire.input), view.info.context_length, tokens_of)
    inputs = Inputs(tokens, pooling, _dimensions(how, wire.dimensions), how.normalise)
    request = Request(
        id=wire.id,
        prompt=inputs.longest,
        params=SamplingParams(),
        max_tokens=0,
        events=queue,
        salt=wire.namespace,
        account=account(wire),
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
        warnings=[f"{name} has no effect" for name in wire.ignored],
    )
    return Prepared(request, accepted)


def _way(view: ModelView) -> tuple[Embedding, Pooling]:
    """Raises `BadRequest` if the model cannot embed, or for an unknown pooling."""
    how = view.info.embedding
    refusal = how.refusal
    if not isinstance(view.model, ShowsHidden):
        refusal = f"family {view.weights.family!r} shows no hidden states"
    if refusal:
        raise BadRequest(f"{view.name} cannot embed: {refusal}", param="model")
    if how.pooling is None:
        raise BadRequest(
            f"{view.name} does not say how its states become a vector (it has no "
            "1_Pooling/config.json): name an embedding model, or let the operator choose "
            "model_info.mlx.pooling, one of last, mean and cls",
            param="model",
        )
    return how, how.pooling


def _prompt(how: Embedding, name: str | None) -> str:
    if name is None:
        return how.prompts.get(how.default_prompt, "")
    if name not in how.prompts:
        known = ", ".join(sorted(how.prompts)) or "none"
        raise BadRequest(
            f"prompt_name: this model has no prompt {name[:80]!r}, it has: {known}",
            param="prompt_name",
        )
    return how.prompts[name]


def _dimensions(how: Embedding, wanted: int | None) -> int:
    if wanted is not None and wanted > how.width:
        raise BadRequest(
            f"dimensions must be at most {how.width}, which this model's vectors have, "
            f"got {wanted}",
            param="dimensions",
        )
    return wanted or how.width


def _bounded(
    count: int, limit: int, tokens_of: Callable[[int, str], Sequence[int]]
) -> list[array[int]]:
    """Tokens of the inputs `input[0]`, `input[1]`, ... (host work). `tokens_of` gets the index and
    that name; `limit`: the model's context. Raises `BadRequest` that names the input,
    `ContextTooLong`."""
    found: list[array[int]] = []
    total = 0
    for index in range(count):
        where = f"input[{index}]"
        try:
            tokens = array("i", tokens_of(index, where))
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
            raise BadRequest(
                f"input: more than {MAX_INPUT_TOKENS} tokens: send it in several requests",
                param="input",
            )
        found.append(tokens)
    return found


def _tokens_of(given: str | list[int], view: ModelView, before: str, where: str) -> Sequence[int]:
    if not given:
        raise BadRequest("it is empty")
    if isinstance(given, str):
        return view.model.tokenizer.encode_plain(given, before=before, special=True)
    within_vocabulary(given, view.info.vocab_size, where)
    return given
