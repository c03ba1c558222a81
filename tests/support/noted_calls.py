"""What a function is asked for while it works as before."""

import functools
from collections.abc import Callable
from typing import Any

import pytest


def note_calls(
    patch: pytest.MonkeyPatch, owner: Any, name: str, what: Callable[..., Any]
) -> list[Any]:
    """The list to which each call of `owner.name` adds `what` of its arguments."""
    original, found = getattr(owner, name), list[Any]()

    @functools.wraps(original)
    def call(*args: Any, **more: Any) -> Any:
        found.append(what(*args, **more))
        return original(*args, **more)

    patch.setattr(owner, name, call)
    return found
