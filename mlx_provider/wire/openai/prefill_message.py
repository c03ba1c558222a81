"""Whether the last message of the assistant begins the reply (a prefill) or is a separate turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PREFIX_KEY = "prefix"
"""A caller of LiteLLM marks such a message with it (1.106.2,
`convert_prefix_message_to_non_prefix_messages`)."""


def split_prefill_mark(messages: Sequence[Any], *, always: bool = False) -> tuple[list[Any], bool]:
    """The messages without the mark, and whether the reply continues the last one. `always`: the
    Messages API, where every last message of the assistant is continued. Clients of other APIs end
    a history with an answer and expect the next turn."""
    *before, last = messages
    if not isinstance(last, Mapping) or PREFIX_KEY not in last:
        return list(messages), always
    rest = {name: value for name, value in last.items() if name != PREFIX_KEY}
    return [*before, rest], bool(last[PREFIX_KEY]) or always
