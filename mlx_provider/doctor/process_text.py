"""A process of a group, in words."""

from __future__ import annotations

from datetime import datetime

from ..protocol.health import ProcessStatus


def process_text(status: ProcessStatus) -> str:
    """Name, host, state, time and reason, in this machine's time zone."""
    since = datetime.fromtimestamp(status.since).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    detail = f": {status.detail}" if status.detail else ""
    process = f", process {status.pid} on {status.device}" if status.pid else ""
    return f"{status.name} on {status.host}{process}: {status.state} since {since}{detail}"
