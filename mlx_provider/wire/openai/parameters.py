"""The parameters of one request, taken one by one; those that are left are refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from ...errors import BadRequest, wrong_part
from ...invalid import shown
from ...protocol.requests import RENDERER_ARGUMENTS
from ..api import ClientNames, expect

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
CONSTRAINTS = {
    "response_format": "an object",
    "grammar": 'a Lark text or {"type": "regex" | "lark", "value": text}',
    "guided_regex": "a text",
    "guided_grammar": "a text",
    "guided_choice": "a list of texts",
    "guided_json": "an object",
}
"""The parameters that say what the answer must look like, and their values."""
NAMES: Mapping[str, tuple[str, ...]] = {
    "grammar": (*reversed(CONSTRAINTS), "tools", "functions"),
    "max_tokens": ("max_completion_tokens",),
    "n": ("best_of",),
    "response_format": ("guided_json",),
    "template": ("chat_template_kwargs",),
    "tool_choice": ("function_call",),
    "tools": ("tools", "functions"),
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
        """The value of `name`, which then counts as known."""
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
        """Only `allowed` values (all without effect) are served."""
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
    """`response_format` and `grammar`, of which at most one is set. Raises `BadRequest` if two
    constraints contradict or one is malformed."""
    given = {name: params.take(name) for name in CONSTRAINTS}
    given = {name: value for name, value in given.items() if value is not None}
    match given:
        case {"response_format": {"type": "text"}}:
            del given["response_format"]
    if len(given) > 1:
        raise BadRequest(f"only one of {', '.join(given)} can be given", param=min(given))
    for name, value in given.items():
        return _field(name, _parse_json(value) if name == "guided_json" else value)
    return {}


def _field(name: str, value: Any) -> dict[str, Any]:
    match name, value:
        case "response_format", dict():
            return {"response_format": value}
        case "guided_json", dict():
            schema = {"name": "guided_json", "schema": value}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        case "guided_choice", [_, *_] if all(isinstance(choice, str) for choice in value):
            choices = "|".join(f"({re.escape(choice)})" for choice in value)
            return {"grammar": {"type": "regex", "value": choices}}
        case "grammar", {"type": "regex" | "lark", "value": str()} if len(value) == 2:
            return {"grammar": value}
        case "guided_regex", str():
            return {"grammar": {"type": "regex", "value": value}}
        case (("grammar" | "guided_grammar"), str()):
            return {"grammar": {"type": "lark", "value": value}}
    raise wrong_part(name, f"must be {CONSTRAINTS[name]}, got {shown(value)}")


def _parse_json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise wrong_part("guided_json", f"is not JSON: {error}") from None


def parameter_names(values: Mapping[str, Any], content: str = "messages") -> ClientNames:
    """`content`: the name of the prompt."""
    given = {name for name, value in values.items() if value is not None}
    found = {
        ours: name
        for ours, names in NAMES.items()
        if (name := next(filter(given.__contains__, names), None)) is not None
    }
    if content != "messages":
        found |= {name: content for name in ("messages", "prompt") if name not in given}
        found["top_logprobs"] = "logprobs"
    if "guided_json" in given:
        found[SCHEMA] = "guided_json"
    if "thinking" in given and "thinking_budget" not in given:
        found["thinking_budget"] = "thinking.budget_tokens"
    return ClientNames({**found, **_tools(values.get("tools"), values.get("functions"))})


def _tools(tools: Any, functions: Any) -> dict[str, str]:
    own, older = (given if isinstance(given, list) else [] for given in (tools, functions))
    custom = [at for at, t in enumerate(own) if isinstance(t, Mapping) and "custom" in t]
    found = {f"tools[{at}].function": f"tools[{at}].custom" for at in custom}
    for at in range(len(older)):
        whole = f"tools[{len(own) + at}]"
        found |= {whole: f"functions[{at}]", f"{whole}.function": f"functions[{at}]"}
    return found


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
    """OpenAI's word, or the object of the Responses API."""
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
    """Anthropic's object: `enabled` with a budget, `adaptive`, or `disabled`."""
    if not value:
        return {}, None
    kind = value.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise BadRequest(
            f"thinking.type must be enabled, adaptive or disabled, got {shown(kind)}",
            param="thinking",
        )
    return {"enable_thinking": kind != "disabled"}, value.get("budget_tokens")
