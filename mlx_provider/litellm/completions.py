"""What is special to `/completions`: raw prompts, several at once, and their echo."""

from __future__ import annotations

from typing import Any

from ..errors import BadRequest
from ..invalid import shown
from .best_of import BestOf
from .call import Call
from .parameters import Parameters

COMPLETION_TOKENS = 16
"""What `/completions` generates unless told, as OpenAI does."""
MAX_CHOICES = 128
"""Prompts times `n` in one request: as many as a single prompt may have."""
MAX_LOGPROBS = 20
CARRIED = "mlx_prompt"
"""Where the hook puts a list of prompts that LiteLLM would not let through."""


def completions(call: Call, params: Parameters) -> list[dict[str, Any]]:
    """The fields of one request for each prompt. Raises `BadRequest` that names the parameter."""
    params.choice("suffix", ("",), "write the model's own fill-in-the-middle tokens into prompt")
    best, n = best_of(call), call.params.get("n", 1)
    params.take("best_of")
    prompts = _prompts(call, params)
    fields: dict[str, Any] = {"echo": params.flag("echo") or False, **_logprobs(params)}
    if best is not None and fields["echo"]:
        raise BadRequest("best_of with echo is not supported: leave out echo", param="best_of")
    if best is not None:
        n = best.made
        fields |= {"n": n, "logprobs": True}
    if not call.params.keys() & {"max_tokens", "max_completion_tokens"}:
        fields["max_tokens"] = COMPLETION_TOKENS
    if isinstance(n, int) and n * len(prompts) > MAX_CHOICES:
        raise BadRequest(
            f"prompt: {len(prompts)} prompts with n={n} make more than {MAX_CHOICES} choices: "
            "send them in several requests",
            param="prompt",
        )
    return [{"prompt": prompt, **fields} for prompt in prompts]


def carry_prompts(kwargs: dict[str, Any]) -> None:
    """Carry lists that hold token ids past LiteLLM, which knows only texts here.

    Raises `BadRequest` for what is no prompt: LiteLLM would answer with a traceback.
    """
    prompts = listed(kwargs.get("prompt"), "prompt")
    if not all(isinstance(each, str) for each in prompts):
        kwargs[CARRIED], kwargs["prompt"] = prompts, ""


def listed(given: Any, name: str) -> list[Any]:
    """A text, token ids, or a list of these, as a list. Raises `BadRequest` that names the item."""
    items = [given] if isinstance(given, str) or _is_tokens(given) else given
    if not isinstance(items, list) or not items:
        raise BadRequest(f"{name} {_SHAPES}, got {type(items).__name__}", param=name)
    for index, each in enumerate(items):
        if not isinstance(each, str) and not _is_tokens(each):
            at = f"{name}[{index}]"
            raise BadRequest(f"{at}: each {name} {_SHAPES}", param=at)
    return items


_SHAPES = "must be a text, a list of token ids, or a list of these, and not empty"


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _prompts(call: Call, params: Parameters) -> list[Any]:
    """LiteLLM makes a user message of each text; lists of token ids come by the hook."""
    carried = params.take(CARRIED)
    if carried is not None:
        return list(carried)
    return [message.get("content", "") for message in call.messages]


def best_of(call: Call) -> BestOf | None:
    """How many choices are to be made beyond those that are wanted; `None`: no more.

    Raises `BadRequest` for a number that cannot be.
    """
    made, wanted = call.params.get("best_of"), call.params.get("n", 1)
    if made is None or made == wanted or not call.text_completion:
        return None
    if type(made) is not int or type(wanted) is not int or not wanted < made <= MAX_CHOICES:
        raise BadRequest(
            f"best_of must be a whole number from n ({shown(wanted)}) to {MAX_CHOICES}, got "
            f"{shown(made)}",
            param="best_of",
        )
    if call.params.get("stream"):
        raise BadRequest(
            "best_of is known when all choices have ended: leave out stream", param="best_of"
        )
    return BestOf(made, wanted, logprobs=call.params.get("logprobs") is not None)


def _logprobs(params: Parameters) -> dict[str, Any]:
    count = params.take("logprobs")
    if count is None:
        return {}
    if type(count) is not int or not 0 <= count <= MAX_LOGPROBS:
        raise BadRequest(
            f"logprobs must be a whole number from 0 to {MAX_LOGPROBS}, got {count!r}",
            param="logprobs",
        )
    return {"logprobs": True, "top_logprobs": count}
