"""Whether the last message of the assistant begins the reply, or is a turn of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MARK = "prefix"
"""By which LiteLLM's callers say so of a message (1.106.2,
`convert_prefix_message_to_non_prefix_messages`)."""


def continued(messages: Sequence[Any], route: str) -> tuple[list[Any], bool]:
    """The messages without the mark, and whether the reply goes on where the last one ends.

    It does for the Messages API, whose contract that is, and where the message is marked. Clients
    of the others end a history with what the assistant has said, and wait for its next turn.
    """
    *before, last = messages
    if not isinstance(last, Mapping) or MARK not in last:
        return list(messages), route.endswith("/messages")
    rest = {name: value for name, value in last.items() if name != MARK}
    return [*before, rest], bool(last[MARK]) or route.endswith("/messages")
