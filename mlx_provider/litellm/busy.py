"""Requests whose client left, as LiteLLM's `least-busy` routing counts them.

It counts a request from the note of its beginning to that of its success or failure (1.106.2 and
1.109.1, `router_strategy/least_busy.py`), and nobody notes that a client has left: the engine that
held the request would count as busier than it is until the count expires, an hour later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import litellm


def left(litellm_params: Mapping[str, Any]) -> None:
    """Let a request that nobody reads any further count no more."""
    from litellm.router_strategy.least_busy import LeastBusyLoggingHandler

    for callback in litellm.callbacks:
        if isinstance(callback, LeastBusyLoggingHandler):
            _beside(callback, {"litellm_params": litellm_params})


def _beside(callback: Any, call: Mapping[str, Any]) -> None:
    """In a thread where there is an event loop, which must not wait for a Redis."""
    note = partial(callback.log_failure_event, call, None, None, None)
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        note()
    else:
        loop.run_in_executor(None, note)
