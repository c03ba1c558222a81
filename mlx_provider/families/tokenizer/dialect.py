"""Finds which messages a chat template accepts, by rendering short conversations at load.

Tries a folder's chat template before the engine thread loads the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint import named_template, read_json
from .hf_tokenizer import HFTokenizer
from .template_fit import fit_messages
from .template_probe import called_once
from .template_renderer import accepted

WORD = "Zyzzyva"
"""Text that no template writes itself."""
Message = Mapping[str, Any]


def dialect(tokenizer: HFTokenizer) -> dict[str, Any]:
    """Fields of `ModelInfo` that describe the required form of messages and tools. Raises
    `UnsupportedModel` for a template that exceeds its limits."""
    return {
        "template": tokenizer.form,
        "alternate": wants_turns(tokenizer),
        "system_role": has_system_role(tokenizer),
    }


def wants_turns(tokenizer: HFTokenizer) -> bool:
    user, reply = _said("user"), _said("assistant")
    pairs = [([user], [user, user]), ([user, reply, user], [user, reply, reply, user])]
    return any(
        _rendered(tokenizer, taken) is not None and _rendered(tokenizer, doubled) is None
        for taken, doubled in pairs
    )


def has_system_role(tokenizer: HFTokenizer) -> bool:
    """Whether a system message is shown, also if a tool result comes last. Some templates raise for
    it, others drop it or write it into the last message, if that is a user's."""
    conversations: list[list[Message]] = [[_said("user")]]
    if tokenizer.form.takes_calls:
        conversations.append([*called_once()])
    system = {"role": "system", "content": WORD}
    return all(
        WORD in (_rendered(tokenizer, [system, *each]) or "")
        for each in conversations
        if _rendered(tokenizer, each) is not None
    )


def refuses_late_system(tokenizer: HFTokenizer) -> bool:
    before, last = [_said("user"), _said("assistant")], _said("user")
    if _rendered(tokenizer, [*before, last]) is None:
        return False
    return _rendered(tokenizer, [*before, _said("system"), last]) is None


def shows_tool_media(tokenizer: HFTokenizer, image: str) -> bool:
    """Whether an image in a tool result is written as `image`, like one in a user message."""
    function = {"name": "look", "arguments": {}}
    listed = [{"id": "call_look", "type": "function", "function": function}]
    call = {"role": "assistant", "content": None, "tool_calls": listed}
    parts = [{"type": "text", "text": "b"}, {"type": "image"}]
    result = {"role": "tool", "tool_call_id": "call_look", "content": parts}
    shown = _rendered(tokenizer, [_said("user"), call, result])
    return bool(image) and (shown or "").count(image) == 1


def _said(role: str) -> Message:
    return {"role": role, "content": "a"}


def _rendered(tokenizer: HFTokenizer, messages: Sequence[Message]) -> str | None:
    fitted = fit_messages(messages, tokenizer.form)
    return accepted(lambda: tokenizer.apply_template(fitted, [], {}, probe="cached"))


FILES = ("tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class _Described:
    """The part of a transformers tokenizer that a template needs, from the files alone."""

    chat_template: str
    special_tokens_map: Mapping[str, str]


def try_template(folder: Path) -> None:
    """Run the probes of a template, so that the load finds their results. Blocks for some seconds.
    A wrong guess of the special tokens costs only time: the load then probes again. Raises
    `UnsupportedModel` for a template that exceeds its limits."""
    source = named_template(folder)
    if source:
        dialect(HFTokenizer(_Described(source, _special_tokens(folder))))


def _special_tokens(folder: Path) -> dict[str, str]:
    """Like `special_tokens_map` of transformers: `bos_token` and others, as text."""
    found: dict[str, str] = {}
    for name in FILES:
        given = read_json(folder / name)
        own = given.get("extra_special_tokens")
        named = {key: value for key, value in given.items() if key.endswith("_token")}
        for key, value in (named | (own if isinstance(own, dict) else {})).items():
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[key] = text
    return found
