"""Finds which messages a chat template accepts, by rendering short conversations at load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
