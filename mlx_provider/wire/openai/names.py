"""Fields of our request by the names of chat and text completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..places import Places
from .constraints import EXTENSIONS

NAMES: Mapping[str, tuple[str, ...]] = {
    "grammar": (*EXTENSIONS, "response_format", "tools", "functions"),
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


def names_of(values: Mapping[str, Any], content: str = "messages") -> Places:
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
    return Places({**found, **_tools(values.get("tools"), values.get("functions"))})


def _tools(tools: Any, functions: Any) -> dict[str, str]:
    own, older = (given if isinstance(given, list) else [] for given in (tools, functions))
    custom = [at for at, t in enumerate(own) if isinstance(t, Mapping) and "custom" in t]
    found = {f"tools[{at}].function": f"tools[{at}].custom" for at in custom}
    for at in range(len(older)):
        whole = f"tools[{len(own) + at}]"
        found |= {whole: f"functions[{at}]", f"{whole}.function": f"functions[{at}]"}
    return found
