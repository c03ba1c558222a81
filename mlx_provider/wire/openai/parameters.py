"""The parameters of one request, taken one by one; those that are left are refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from ...errors import BadRequest, wrong_part
from ...invalid import shown
from ...protocol.requests import RENDERER_ARGUMENTS
from ..api import ClientNames, expect, expect_object

T = TypeVar("T")
WithoutEffect = tuple[object, ...] | None
"""Of a parameter without effect: the values that ask for nothing; others get a warning. `None`: the
parameter changes no answer, or other code handles it."""
WITHOUT_EFFECT: Mapping[str, WithoutEffect] = {
    **dict.fromkeys(("model", "stream", "stream_options", "metadata", "prompt_cache_retention")),
    "context_management": (),
    "output_config": (),
    "prediction": (),
    "return_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "web_search_options": (),
}
NAMES: Mapping[str, tuple[str, ...]] = {
    "grammar": ("grammar", "response_format", "tools"),
    "max_tokens": ("max_completion_tokens",),
    "template": ("chat_template_kwargs",),
}
"""The parameters that set each field, if other than its name; the first that is given counts. A
constraint of any kind fails as a grammar."""
SCHEMA = "response_format.json_schema.schema"


class Parameters:
    def __init__(
        self,
        values: Mapping[str, Any],
        without_effect: Mapping[str, WithoutEffect] | None = None,
        ignored: Iterable[str] = (),
    ) -> None:
        """`without_effect`: besides `WITHOUT_EFFECT`. `ignored`: further names for the warning."""
        self._without_effect = {**(without_effect or {}), **WITHOUT_EFFECT}
        self._ignored = [*ignored]
        self._left = {name: value for name, value in values.items() if value is not None}

    def take(self, name: str, default: Any = None) -> Any:
        return self._left.pop(name, default)

    def typed(self, name: str, kind: type[T]) -> T | None:
        value = self.take(name)
        return None if value is None else expect(value, kind, name)

    def flag(self, name: str) -> bool | None:
        return self.typed(name, bool)

    def mapping(self, name: str) -> dict[str, Any]:
        return dict(self.typed(name, Mapping) or {})  # type: ignore[type-abstract]

    def number(self, name: str) -> Any:
        """Refuses a truth value, which is a number in Python."""
        value = self.take(name)
        if isinstance(value, bool):
            raise wrong_part(name, f"must be a number, got {shown(value)}")
        return value

    def choice(self, name: str, allowed: tuple[object, ...], remedy: str) -> None:
        value = self.take(name)
        if value is not None and value not in allowed:
            raise BadRequest(f"{name}={shown(value)} is not supported: {remedy}", param=name)

    def ignore(self, parts: Iterable[str]) -> None:
        self._ignored += parts

    def ignored(self) -> list[str]:
        """Take parameters without effect; returns the names for the warning."""
        return self._ignored + [
            name
            for name, nothing in self._without_effect.items()
            if (value := self.take(name)) is not None
            and nothing is not None
            and value not in nothing
        ]

    def rest(self) -> dict[str, Any]:
        rest, self._left = self._left, {}
        return rest

    def refuse_rest(self) -> None:
        if self._left:
            names = ", ".join(sorted(self._left))
            raise BadRequest(f"unknown parameter: {names}", param=min(self._left))


def constraint(params: Parameters) -> dict[str, Any]:
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
    raise wrong_part("grammar", f"must be {allowed}, got {shown(grammar)}")


def parameter_names(values: Mapping[str, Any], content: str = "messages") -> ClientNames:
    given = {name for name, value in values.items() if value is not None}
    found = {
        ours: name
        for ours, names in NAMES.items()
        if (name := next(filter(given.__contains__, names), None)) is not None
    }
    if content != "messages":
        found |= {name: content for name in ("messages", "prompt") if name not in given}
        found["top_logprobs"] = "logprobs"
    if "thinking" in given and "thinking_budget" not in given:
        found["thinking_budget"] = "thinking.budget_tokens"
    tools = values.get("tools")
    for at, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, Mapping) and "custom" in tool:
            found[f"tools[{at}].function"] = f"tools[{at}].custom"
    return ClientNames(found)


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
    own = params.mapping("chat_template_kwargs")
    if taken := RENDERER_ARGUMENTS & own.keys():
        raise wrong_part("chat_template_kwargs", f"cannot set {', '.join(sorted(taken))}")
    given_budget = params.number("thinking_budget")
    return variables | own, budget if given_budget is None else given_budget


def _effort(value: object) -> dict[str, Any]:
    if isinstance(value, dict):
        value = value.get("effort")
    if value is None:
        return {}
    if not isinstance(value, str):
        raise wrong_part("reasoning_effort", f"must be a word, got {shown(value)}")
    if value in ("none", "disable"):
        return {"enable_thinking": False}
    return {"reasoning_effort": value, "enable_thinking": True}


def _thinking(value: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
    if not value:
        return {}, None
    kind = value.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise BadRequest(
            f"thinking.type must be enabled, adaptive or disabled, got {shown(kind)}",
            param="thinking",
        )
    return {"enable_thinking": kind != "disabled"}, value.get("budget_tokens")
