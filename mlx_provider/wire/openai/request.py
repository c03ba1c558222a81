"""Turns the parameters of chat and text completions into the engine's requests. The other APIs and
LiteLLM's provider translate theirs into these first. A wrong parameter raises `BadRequest`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from ...bounds import MAX_NAME
from ...errors import BadRequest, wrong_part
from ...invalid import bad_request, quote
from ...protocol.requests import GenerateRequest, Sampling
from ..api import ClientNames, expect, expect_object

T = TypeVar("T")
WithoutEffect = tuple[object, ...] | None
"""For a parameter that has no effect: its values that give no warning. `None`: no value gives one,
because the parameter changes no answer or other code reads it."""
WITHOUT_EFFECT: Mapping[str, WithoutEffect] = {
    **dict.fromkeys(("model", "stream", "stream_options", "metadata", "prompt_cache_retention")),
    **dict.fromkeys("context_management output_config prediction web_search_options".split(), ()),
    **dict.fromkeys(("return_token_ids", "store", "timings"), (False,)),
    "service_tier": ("auto", "default"),
}
NAMES: Mapping[str, tuple[str, ...]] = {
    "grammar": ("grammar", "response_format", "tools"),
    "max_tokens": ("max_completion_tokens",),
    "template": ("chat_template_kwargs",),
}
"""By field of our request: the parameters that may set it, if the name differs. An error names the
first of them that was given. The engine reports every constraint, tools included, as `grammar`."""
SCHEMA = "response_format.json_schema.schema"  # its place in errors; other APIs replace it
FUNCTION_MEMBERS = ("name", "description", "parameters", "strict", "return", "returns", "response")
"""Members of a function that chat templates know."""
COMPLETION_TOKENS = 16
"""Default of `max_tokens` in `/completions`, as in OpenAI's API."""
MAX_CHOICES = 128  # of all prompts of a text completion
MAX_LOGPROBS = 20  # for each token
PREFIX_KEY = "prefix"
"""If this member of the last message is true, the reply continues that message (LiteLLM 1.106.2,
`convert_prefix_message_to_non_prefix_messages`)."""
SAMPLING = tuple(Sampling.model_fields)


class Parameters:
    """The parameters of a request. `None` counts as absent. Each reader takes its own, so those
    that are left at the end are unknown."""

    def __init__(
        self,
        values: Mapping[str, Any],
        without_effect: Mapping[str, WithoutEffect] | None = None,
        ignored: Iterable[str] = (),
    ) -> None:
        """`without_effect`: added to `WITHOUT_EFFECT`, or in place of its entries. `ignored`: more
        names of which `take_ignored` warns."""
        self._without_effect = {**WITHOUT_EFFECT, **(without_effect or {})}
        self._ignored = [*ignored]
        self._left = {name: value for name, value in values.items() if value is not None}

    def take(self, name: str, default: Any = None) -> Any:
        """Remove a parameter and return its value."""
        return self._left.pop(name, default)

    def take_typed(self, name: str, kind: type[T]) -> T | None:
        """Like `take`, for a value of one type. `None`: absent."""
        value = self.take(name)
        return None if value is None else expect(value, kind, name)

    def flag(self, name: str) -> bool | None:
        return self.take_typed(name, bool)

    def mapping(self, name: str) -> dict[str, Any]:
        return dict(self.take_typed(name, Mapping) or {})  # type: ignore[type-abstract]

    def number(self, name: str) -> Any:
        """Like `take`, but refuses a truth value, which is a number in Python. Others are checked
        later, by the request's class."""
        value = self.take(name)
        if isinstance(value, bool):
            raise wrong_part(name, f"must be a number, got {quote(value)}")
        return value

    def choice(self, name: str, allowed: tuple[object, ...], remedy: str) -> None:
        """Remove a parameter, and refuse every value but those in `allowed`."""
        value = self.take(name)
        if value is not None and value not in allowed:
            raise BadRequest(f"{name}={quote(value)} is not supported: {remedy}", param=name)

    def take_ignored(self) -> list[str]:
        """Remove the parameters without effect; returns the names for the warning."""
        names = [*self._ignored]
        for name, silent in self._without_effect.items():
            value = self.take(name)
            if not (value is None or silent is None or value in silent):
                names.append(name)
        return names

    def rest(self) -> dict[str, Any]:
        """Remove and return all that are left."""
        rest, self._left = self._left, {}
        return rest

    def refuse_rest(self) -> None:
        """Raises `BadRequest` if any are left."""
        if self._left:
            names = ", ".join(sorted(self._left))
            raise BadRequest(f"unknown parameter: {names}", param=min(self._left))


def generate_requests(
    params: Parameters,
    sender: Mapping[str, Any],
    content: Any,
    *,
    text: bool = False,
    continues: bool = False,
) -> list[GenerateRequest]:
    """One request, or one for each prompt of a text completion. `sender`: fields that no parameter
    sets, such as `model` and `options`. `content`: the messages, or the list of prompts (`text`).
    `continues`: the reply always continues the last message."""
    template, budget = template_variables(params)
    stop = params.take("stop", [])
    fields: dict[str, Any] = {
        "sampling": _take_all(params.number, SAMPLING),
        "template": template,
        "thinking_budget": budget,
        "stop": [stop] if isinstance(stop, str) else stop,
        "session": _session(params, sender.get("session")),
        "retain": params.take("prompt_cache_retention") == "24h",
        **_take_all(params.number, ("n", "min_tokens")),
        **_take_all(params.take, ("stop_token_ids", "drafts", "sparse_prefill")),
        **_max_tokens(params),
        **constraint(params),
    }
    params.choice("modalities", (["text"],), "this model writes text only")
    params.choice("audio", (), "this model writes text only")
    if text:
        own_fields = _completions(params, content, fields)
    else:
        own_fields = [_chat(params, content, continues=continues)]
    fields["ignored"] = params.take_ignored()
    params.refuse_rest()
    try:
        return [GenerateRequest.model_validate({**sender, **fields, **own}) for own in own_fields]
    except ValidationError as error:
        raise bad_request(error, flat=True) from None


def template_variables(params: Parameters) -> tuple[dict[str, Any], int | None]:
    """Variables for the chat template, and the budget of thought tokens. Precedence:
    `chat_template_kwargs`, `enable_thinking`, `thinking` (Anthropic), `reasoning_effort`
    (OpenAI)."""
    variables = _effort(params.take("reasoning_effort"))
    switches, budget = _thinking(params.mapping("thinking"))
    variables.update(switches)
    if (enabled := params.flag("enable_thinking")) is not None:
        variables["enable_thinking"] = enabled
    if (verbosity := params.take("verbosity")) is not None:
        variables["verbosity"] = verbosity
    variables |= params.mapping("chat_template_kwargs")
    given_budget = params.number("thinking_budget")
    return variables, budget if given_budget is None else given_budget


def _effort(value: object) -> dict[str, Any]:
    if isinstance(value, dict):
        value = value.get("effort")
    if value is None:
        return {}
    if not isinstance(value, str):
        raise wrong_part("reasoning_effort", f"must be a word, got {quote(value)}")
    if value in ("none", "disable"):
        return {"enable_thinking": False}
    return {"reasoning_effort": value, "enable_thinking": True}


def _thinking(value: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
    if not value:
        return {}, None
    kind = value.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        problem = f"must be enabled, adaptive or disabled, got {quote(kind)}"
        raise wrong_part("thinking", problem, ".type")
    budget = None if kind == "disabled" else value.get("budget_tokens")
    if isinstance(budget, bool):
        raise wrong_part("thinking.budget_tokens", f"must be a number, got {quote(budget)}")
    return {"enable_thinking": kind != "disabled"}, budget


def _take_all(take: Callable[[str], Any], names: tuple[str, ...]) -> dict[str, Any]:
    taken = {name: take(name) for name in names}
    return {name: value for name, value in taken.items() if value is not None}


def _session(params: Parameters, known: Any) -> str | None:
    names = ("prompt_cache_key", "user", "safety_identifier")
    given = (known, *[params.take(name) for name in names])
    return next((str(name)[:MAX_NAME] for name in given if name), None)


def _max_tokens(params: Parameters) -> dict[str, Any]:
    legacy, current = params.number("max_tokens"), params.number("max_completion_tokens")
    limit = legacy if current is None else current
    return {} if limit is None else {"max_tokens": None if limit == -1 else limit}


def constraint(params: Parameters) -> dict[str, Any]:
    """The field `response_format` or `grammar`, if the request has one."""
    form, grammar = params.take("response_format"), params.take("grammar")
    if isinstance(form, dict) and form.get("type") == "text":
        form = None
    if form is not None and grammar is not None:
        raise BadRequest("only one of response_format, grammar can be given", param="grammar")
    if form is not None:
        return {"response_format": expect_object(form, "response_format")}
    match grammar:
        case None:
            return {}
        case str():
            return {"grammar": {"type": "lark", "value": grammar}}
        case {"type": "regex" | "lark", "value": str()} if len(grammar) == 2:
            return {"grammar": grammar}
    allowed = 'a Lark text or {"type": "regex" | "lark", "value": text}'
    raise wrong_part("grammar", f"must be {allowed}, got {quote(grammar)}")


def _completions(
    params: Parameters, prompts: Sequence[Any], shared: Mapping[str, Any]
) -> list[dict[str, Any]]:
    params.choice("suffix", ("",), "write the model's own fill-in-the-middle tokens into prompt")
    fields: dict[str, Any] = {"echo": params.flag("echo") or False, **_logprobs(params)}
    if "max_tokens" not in shared:
        fields["max_tokens"] = COMPLETION_TOKENS
    n = shared.get("n", 1)
    params.choice("best_of", (n,), "ask for n choices and compare their log-probabilities")
    if not isinstance(n, int):
        raise wrong_part("n", f"must be a whole number, got {quote(n)}")
    if n * len(prompts) > MAX_CHOICES:
        problem = f"{len(prompts)} prompts with n={n} make more than {MAX_CHOICES} choices"
        raise wrong_part("prompt", f"{problem}: send them in several requests", ":")
    return [{"prompt": prompt, **fields} for prompt in prompts]


def _logprobs(params: Parameters) -> dict[str, Any]:
    count = params.take("logprobs")
    if count is None:
        return {}
    if type(count) is not int or not 0 <= count <= MAX_LOGPROBS:
        bounds = f"from 0 to {MAX_LOGPROBS}"
        raise wrong_part("logprobs", f"must be a whole number {bounds}, got {quote(count)}")
    return {"logprobs": True, "top_logprobs": count}


def _chat(params: Parameters, messages: Any, *, continues: bool) -> dict[str, Any]:
    if not isinstance(messages, list) or not messages:
        raise wrong_part("messages", "must be a list of at least one message")
    top, wanted = params.number("top_logprobs"), params.flag("logprobs")
    if top is not None and not wanted:
        raise wrong_part("top_logprobs", "needs logprobs to be true")
    *before, last = messages
    continues = _continues(params, last) or continues
    if isinstance(last, Mapping) and PREFIX_KEY in last:
        continues = continues or bool(last[PREFIX_KEY])
        messages = [*before, {name: last[name] for name in last if name != PREFIX_KEY}]
    logprobs = {"logprobs": bool(wanted), "top_logprobs": top or 0}
    return {"messages": messages, "continues": continues, **logprobs, **_tools(params)}


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
    fields = {
        "tools": as_functions(params.take_typed("tools", list) or []) or None,
        "tool_choice": params.take("tool_choice"),
        "parallel_tool_calls": params.flag("parallel_tool_calls"),
    }
    return {name: value for name, value in fields.items() if value is not None}


def as_functions(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """The tools of a request, checked. Members that templates do not know are left out."""
    functions = [_function(tool, f"tools[{at}]") for at, tool in enumerate(tools)]
    return [
        {"type": "function", "function": {name: f[name] for name in f if name in FUNCTION_MEMBERS}}
        for f in functions
    ]


def _function(tool: Any, where: str) -> Mapping[str, Any]:
    kind = expect_object(tool, where).get("type") or "function"
    if kind != "function":
        reason = "only tools of type function can be called, and no server runs others here"
        raise wrong_part(where, f"is {quote(kind)}: {reason}", ".type")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise wrong_part(where, "must be an object with a name", ".function")
    if not isinstance(function.get("name"), str) or not function["name"].strip():
        raise wrong_part(f"{where}.function.name", "must be a text")
    if function.get("parameters"):
        expect_object(function["parameters"], f"{where}.function.parameters")
    return function


def prompt_list(given: Any, name: str) -> list[Any]:
    """The parameter `name` as a list of texts and lists of token ids."""
    items = [given] if isinstance(given, str) or is_token_list(given) else given
    if not isinstance(items, list) or not items:
        several = "must be a text, a list of token ids, or a list of these, and not empty"
        raise wrong_part(name, f"{several}, got {type(items).__name__}")
    for index, item in enumerate(items):
        if not isinstance(item, str) and not is_token_list(item):
            one = f"must be a text or a list of token ids, and not empty, got {quote(item)}"
            raise wrong_part(f"{name}[{index}]", one)
    return items


def is_token_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def parameter_names(values: Mapping[str, Any], content: str = "messages") -> ClientNames:
    """The client's name of each field. `content`: its parameter with the messages or the prompt."""
    given = {name for name, value in values.items() if value is not None}
    found: dict[str, str] = {}
    for ours, names in NAMES.items():
        if present := [name for name in names if name in given]:
            found[ours] = present[0]
    if content != "messages":  # text completions
        found |= {name: content for name in ("messages", "prompt") if name not in given}
        found["top_logprobs"] = "logprobs"
    if "thinking" in given and "thinking_budget" not in given:
        found["thinking_budget"] = "thinking.budget_tokens"
    return ClientNames(found)
