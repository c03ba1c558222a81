"""One `created` for all chunks of a stream.

LiteLLM's wrapper makes the last chunks of a stream itself and reads the clock again for them
(1.106.2 and 1.109.1, `CustomStreamWrapper.model_response_creator`), so one stream could have two
stamps. The wrapper has no parameter for the stamp: our streams carry it as an attribute.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from litellm import CustomStreamWrapper

ATTRIBUTE = "mlx_created"
"""Of a completion stream: Unix seconds. By name, because LiteLLM may run a handler's module twice
under two identities; no other provider's stream has it."""


def share_created_stamp() -> None:
    """Make LiteLLM's wrapper use the stamp of our streams. Idempotent."""
    original = CustomStreamWrapper.__init__
    if hasattr(original, ATTRIBUTE):
        return

    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        stamp = getattr(self.completion_stream, ATTRIBUTE, None)
        if stamp is not None:
            self.created = stamp

    setattr(init, ATTRIBUTE, True)
    CustomStreamWrapper.__init__ = init
