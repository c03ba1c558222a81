"""Corrects the counts of LiteLLM's `least-busy` routing for requests whose client left.

LiteLLM counts a request until its success or failure is reported (1.106.2 and 1.109.1,
`router_strategy/least_busy.py`), and reports neither when a client leaves: the engine would seem
busier than it is until the counter expires, an hour later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import litellm


def uncount(litellm_params: Mapping[str, Any]) -> None:
    """Stop counting a request whose client left."""
    from litellm.router_strategy.least_busy import LeastBusyLoggingHandler

    for callback in litellm.callbacks:
        if isinstance(callback, LeastBusyLoggingHandler):
            _report_failure(callback, {"litellm_params": litellm_params})


def _report_failure(callback: Any, call: Mapping[str, Any]) -> None:
    """Report in another thread if an event loop runs, because the loop must not wait for Redis."""
    report = partial(callback.log_failure_event, call, None, None, None)
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        report()
    else:
        loop.run_in_executor(None, report)
