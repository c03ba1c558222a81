"""Checks that need the model: context, token ids, space for the reply."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import BadRequest, ContextTooLong
from ..protocol.requests import GenerateRequest
from ..records import ModelInfo, Prompt


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
