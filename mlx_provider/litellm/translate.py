"""An OpenAI request, as LiteLLM delivers it, to the engine's request."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from ..bounds import MAX_NAME
from ..errors import BadRequest
from ..invalid import bad_request
from ..protocol.requests import GenerateRequest
from ..protocol.sampling import Sampling
from .call import Call
from .completions import completions
from .constraints import constraint
from .operator import (
    Caller,
    OperatorOptions,
    chosen_by,
    engine_options,
    operator_options,
    tenant,
)
from .parameters import Parameters
from .prefill_message import split_prefill_mark
from .routes import route
from .thinking import template_variables

SAMPLING = tuple(Sampling.model_fields)
PLAIN = ("n", "min_tokens", "stop_token_ids", "drafts", "sparse_prefill")


def generate_requests(call: Call) -> list[GenerateRequest]:
    """The requests for the engine: one, or one for each prompt of a text completion.

    Raises `BadRequest` that names the parameter at fault.
    """
    params = Parameters(call.params)
    options = operator_options(call.litellm_params)
    caller = Caller.read(call.litellm_params)
    template, budget = template_variables(params)
    fields: dict[str, Any] = {
        "model": call.model,
        "sampling": _given(params, SAMPLING),
        "template": template,
        "thinking_budget": budget,
        "stop": _stop(params),
        "session": _session(call, params),
        "origin": chosen_by(call.litellm_params, call.model),
        "tenant": tenant(options, caller),
        "options": engine_options(options),
        "timeout": call.deadline.left(),
        **_given(params, PLAIN),
        **_max_tokens(params),
        **constraint(params),
    }
    params.choice("modalities", (["text"],), "this model writes text only")
    params.choice("audio", (), "this model writes text only")
    each = completions(call, params) if call.text_completion else [_chat(call, params)]
    params.flag("timings")
    fields["ignored"] = _ignored(params, options)
    params.refuse_rest()
    return [_validated(fields | more) for more in each]


def _validated(fields: dict[str, Any]) -> GenerateRequest:
    try:
        return GenerateRequest.model_validate(fields)
    except ValidationError as error:
        raise bad_request(error, flat=True) from None


def _given(params: Parameters, names: tuple[str, ...]) -> dict[str, Any]:
    taken = {name: params.take(name) for name in names}
    return {name: value for name, value in taken.items() if value is not None}


def _max_tokens(params: Parameters) -> dict[str, Any]:
    legacy, current = params.take("max_tokens"), params.take("max_completion_tokens")
    limit = legacy if current is None else current
    return {} if limit is None else {"max_tokens": limit}


def _stop(params: Parameters) -> Any:
    """All stop strings; `mlx_stop` is how the hook saves them from LiteLLM's limit of four."""
    saved, plain = params.take("mlx_stop"), params.take("stop")
    stop = plain if saved is None else saved
    if stop is None:
        return []
    return [stop] if isinstance(stop, str) else stop


def _ignored(params: Parameters, options: OperatorOptions) -> list[str]:
    """Names that the client is told of. Raises `BadRequest` where the operator wants it so."""
    ignored = params.ignored()
    if ignored and options.on_ignored_params == "refuse":
        raise BadRequest(
            f"{', '.join(ignored)}: has no effect here, leave it out", param=ignored[0]
        )
    return ignored


def _session(call: Call, params: Parameters) -> str | None:
    """Who this request belongs with, by the most particular name that was given."""
    given = (
        call.litellm_params.get("litellm_session_id"),  # also of `metadata` and of headers
        params.take("prompt_cache_key"),
        params.take("user"),
        params.take("safety_identifier"),
    )
    return next((str(name)[:MAX_NAME] for name in given if name), None)


def _chat(call: Call, params: Parameters) -> dict[str, Any]:
    if not isinstance(call.messages, list) or not call.messages:
        raise BadRequest("messages must be a list of at least one message", param="messages")
    top, wanted = params.take("top_logprobs"), params.flag("logprobs")
    if top is not None and not wanted:
        raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    messages, continues = split_prefill_mark(call.messages, route(call.litellm_params))
    return {
        "messages": messages,
        "continues": continues,
        "logprobs": bool(wanted),
        "top_logprobs": top or 0,
        **_tools(params),
    }


def _tools(params: Parameters) -> dict[str, Any]:
    """Tools and their choice; the older `functions` and `function_call` mean the same."""
    tools, functions = params.take("tools"), params.take("functions")
    choice, call = params.take("tool_choice"), params.take("function_call")
    parallel = params.flag("parallel_tool_calls")
    if functions is not None:
        tools = [*(tools or []), *({"type": "function", "function": f} for f in functions)]
        parallel = False  # the older answer has room for one call
    if isinstance(call, dict):
        choice = {"type": "function", "function": {"name": call.get("name")}}
    elif call is not None:
        choice = call
    fields = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}
    return {name: value for name, value in fields.items() if value is not None}
