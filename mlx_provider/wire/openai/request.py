"""Parameters of chat and text completions to the engine's requests, and the form in which the
client wants the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pydantic import ValidationError

from ...bounds import MAX_NAME
from ...errors import BadRequest, wrong_part
from ...invalid import bad_request
from ...protocol.requests import GenerateRequest, Sampling
from .parameters import Parameters, constraint, template_variables
from .tools import as_functions, choice_of, custom_names, with_functions

COMPLETION_TOKENS = 16
"""Default of `max_tokens` in `/completions`, as in OpenAI's API."""
MAX_CHOICES = 128
MAX_LOGPROBS = 20
PREFIX_KEY = "prefix"
"""A caller of LiteLLM marks such a message with it (1.106.2,
`convert_prefix_message_to_non_prefix_messages`)."""
SAMPLING = tuple(Sampling.model_fields)
_SHAPES = "must be a text, a list of token ids, or a list of these, and not empty"


@dataclass(frozen=True)
class AnswerForm:
    text: bool = False
    timings: bool = False
    custom: frozenset[str] = frozenset()

    @classmethod
    def of(cls, values: Mapping[str, Any], *, text: bool) -> Self:
        return cls(text, values.get("timings") is True, custom_names(values.get("tools")))


def split_prefill_mark(messages: Sequence[Any], *, always: bool = False) -> tuple[list[Any], bool]:
    """The messages without the mark, and whether the reply continues the last one. `always`: the
    Messages API, where every last message of the assistant is continued. Clients of other APIs end
    a history with an answer and expect the next turn."""
    *before, last = messages
    if not isinstance(last, Mapping) or PREFIX_KEY not in last:
        return list(messages), always
    rest = {name: value for name, value in last.items() if name != PREFIX_KEY}
    return [*before, rest], bool(last[PREFIX_KEY]) or always


def generate_requests(
    params: Parameters,
    sender: Mapping[str, Any],
    content: Any,
    form: AnswerForm,
    *,
    continues: bool = False,
) -> list[GenerateRequest]:
    """One request, or one for each prompt of a text completion. `sender`: fields that no parameter
    sets, such as `model` and `options`. `content`: the messages, or the list of prompts.
    `continues`: the reply always continues the last message."""
    template, budget = template_variables(params)
    fields: dict[str, Any] = {
        "sampling": _take_all(params.number, SAMPLING),
        "template": template,
        "thinking_budget": budget,
        "stop": [stop] if isinstance(stop := params.take("stop", []), str) else stop,
        "session": _session(params, sender.get("session")),
        "retain": params.take("prompt_cache_retention") == "24h",
        **_take_all(params.number, ("n", "min_tokens")),
        **_take_all(params.take, ("stop_token_ids", "drafts", "sparse_prefill")),
        **_max_tokens(params),
        **constraint(params),
    }
    params.choice("modalities", (["text"],), "this model writes text only")
    params.choice("audio", (), "this model writes text only")
    if form.text:
        each = completions(params, content, fields)
    else:
        each = [_chat(params, content, continues=continues)]
    params.flag("timings")
    fields["ignored"] = params.ignored()
    params.refuse_rest()
    return [_validate({**sender, **fields, **more}) for more in each]


def _validate(fields: dict[str, Any]) -> GenerateRequest:
    try:
        return GenerateRequest.model_validate(fields)
    except ValidationError as error:
        raise bad_request(error, flat=True) from None


def _take_all(take: Callable[[str], Any], names: tuple[str, ...]) -> dict[str, Any]:
    taken = {name: take(name) for name in names}
    return {name: value for name, value in taken.items() if value is not None}


def _max_tokens(params: Parameters) -> dict[str, Any]:
    legacy, current = params.number("max_tokens"), params.number("max_completion_tokens")
    limit = legacy if current is None else current
    return {} if limit is None else {"max_tokens": None if limit == -1 else limit}


def _session(params: Parameters, known: Any) -> str | None:
    names = ("prompt_cache_key", "user", "safety_identifier")
    given = (known, *[params.take(name) for name in names])
    return next((str(name)[:MAX_NAME] for name in given if name), None)


def _chat(params: Parameters, messages: Any, *, continues: bool) -> dict[str, Any]:
    if not isinstance(messages, list) or not messages:
        raise wrong_part("messages", "must be a list of at least one message")
    top, wanted = params.number("top_logprobs"), params.flag("logprobs")
    if top is not None and not wanted:
        raise wrong_part("top_logprobs", "needs logprobs to be true")
    continues = _continues(params, messages[-1]) or continues
    messages, continues = split_prefill_mark(messages, always=continues)
    return {
        "messages": with_functions(messages),
        "continues": continues,
        "logprobs": bool(wanted),
        "top_logprobs": top or 0,
        **_tools(params),
    }


def _continues(params: Parameters, last: Any) -> bool:
    wanted, new_turn = params.flag("continue_final_message"), params.flag("add_generation_prompt")
    if wanted and new_turn:
        raise wrong_part("add_generation_prompt", "must be false with continue_final_message")
    if new_turn is False and not wanted:
        only = "false is only supported with continue_final_message"
        raise wrong_part("add_generation_prompt", only)
    if wanted and not (isinstance(last, Mapping) and last.get("role") == "assistant"):
        raise wrong_part("continue_final_message", "needs a last message of the assistant")
    return bool(wanted)


def _tools(params: Parameters) -> dict[str, Any]:
    fields, members = as_functions(params.typed("tools", list) or [])
    params.ignore(members)
    fields["tool_choice"] = choice_of(params.take("tool_choice"))
    fields["parallel_tool_calls"] = params.flag("parallel_tool_calls")
    return {name: value for name, value in fields.items() if value is not None}


def completions(
    params: Parameters, prompts: Sequence[Any], shared: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The fields of each prompt's request, beside those that are `shared`."""
    params.choice("suffix", ("",), "write the model's own fill-in-the-middle tokens into prompt")
    fields: dict[str, Any] = {"echo": params.flag("echo") or False, **_logprobs(params)}
    if "max_tokens" not in shared:
        fields["max_tokens"] = COMPLETION_TOKENS
    n = shared.get("n", 1)
    params.choice("best_of", (n,), "ask for n choices and compare their log-probabilities")
    if isinstance(n, int) and n * len(prompts) > MAX_CHOICES:
        raise BadRequest(
            f"prompt: {len(prompts)} prompts with n={n} make more than {MAX_CHOICES} choices: "
            "send them in several requests",
            param="prompt",
        )
    return [{"prompt": prompt, **fields} for prompt in prompts]


def prompt_list(given: Any, name: str) -> list[Any]:
    items = [given] if isinstance(given, str) or _is_tokens(given) else given
    if not isinstance(items, list) or not items:
        raise wrong_part(name, f"{_SHAPES}, got {type(items).__name__}")
    for index, each in enumerate(items):
        if not isinstance(each, str) and not _is_tokens(each):
            at = f"{name}[{index}]"
            raise BadRequest(f"{at}: each {name} {_SHAPES}", param=at)
    return items


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _logprobs(params: Parameters) -> dict[str, Any]:
    count = params.take("logprobs")
    if count is None:
        return {}
    if type(count) is not int or not 0 <= count <= MAX_LOGPROBS:
        bounds = f"from 0 to {MAX_LOGPROBS}"
        raise wrong_part("logprobs", f"must be a whole number {bounds}, got {count!r}")
    return {"logprobs": True, "top_logprobs": count}
