"""A rank in words."""

from __future__ import annotations

from datetime import datetime

from ..protocol.health import RankStatus


def rank_text(rank: RankStatus) -> str:
    """Rank, host, state, time and reason, in this machine's time zone."""
    since = datetime.fromtimestamp(rank.since).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    detail = f": {rank.detail}" if rank.detail else ""
    process = f", process {rank.pid} on {rank.device}" if rank.pid else ""
    return f"{rank.rank} on {rank.host}{process}: {rank.state} since {since}{detail}"
