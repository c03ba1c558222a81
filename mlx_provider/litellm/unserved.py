"""Refuses calls that mlx models do not serve, with an error of one line. LiteLLM would answer with
a traceback (`'mlx' is not a valid LlmProviders`), or send the text to another server, whose 404
would disable the chat model for seconds (1.106.2, `amoderation`)."""

from __future__ import annotations

from typing import Any, NoReturn

from litellm.types.utils import CallTypes

from ..errors import BadRequest
from .errors import LiteLLMErrors

SERVED = frozenset(
    {
        CallTypes.completion,
        CallTypes.acompletion,
        CallTypes.text_completion,
        CallTypes.atext_completion,
        CallTypes.responses,
        CallTypes.aresponses,
        CallTypes.aresponses_websocket,
        CallTypes.anthropic_messages,
        CallTypes.aanthropic_messages,
        CallTypes.embedding,
        CallTypes.aembedding,
    }
)


def check_served(call_type: Any) -> None:
    """Raises `BadRequest` that names the kind of call. A kind that LiteLLM cannot name passes."""
    if call_type is not None and call_type not in SERVED:
        raise _refusal(_name(call_type.value))


def unserved(name: str) -> Any:
    def refuse(self: object, *args: Any, **given: Any) -> NoReturn:
        with LiteLLMErrors(given["model"]):
            raise _refusal(name)
        raise AssertionError  # a context can suppress an error, this one never does

    return refuse


def _refusal(name: str) -> BadRequest:
    return BadRequest(
        f"{name} is not served by mlx models, which answer chat completions, completions, "
        "responses, messages and embeddings: name a model of another provider",
        param="model",
    )


def _name(call_type: str) -> str:
    plain = call_type.removeprefix("a")
    return plain if plain in {each.value for each in CallTypes} else call_type
