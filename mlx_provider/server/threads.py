"""Threads for the code of one request that would keep the event loop waiting."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import anyio
import anyio.to_thread

from ..errors import MLXProviderError, for_another

T = TypeVar("T")


async def in_thread(
    call: Callable[[], T],
    limiter: anyio.CapacityLimiter | None = None,
    abandon_on_cancel: bool = False,
) -> T:
    """Parameters as `anyio.to_thread.run_sync`.

    Raises the `MLXProviderError` of the call without its frames, which hold the request: `run_sync`
    (anyio 4.16) keeps a reference cycle, and an idle engine runs no garbage collection."""
    outcome = await anyio.to_thread.run_sync(
        partial(_outcome, call), limiter=limiter, abandon_on_cancel=abandon_on_cancel
    )
    if isinstance(outcome, MLXProviderError):
        raise for_another(outcome)
    return outcome


def _outcome(call: Callable[[], T]) -> T | MLXProviderError:
    try:
        return call()
    except MLXProviderError as error:
        return for_another(error)
