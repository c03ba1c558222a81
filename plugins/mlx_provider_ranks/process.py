"""`python -m mlx_provider_ranks.process`: one rank, as `mlx.launch` starts it.

Rank 0 becomes the engine server, the others follow it. The supervisor writes to standard input: a
line `stop` ends the group in order. If there is no line for a while, the supervisor is lost.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from mlx_provider.errors import MLXProviderError, ProcessLost
from mlx_provider.replicas import (
    EngineSettings,
    Fault,
    Isolation,
    PluginRegistry,
    engine_settings,
    log_to_stderr,
    printable,
)
from mlx_provider.replicas.server import (
    Deliver,
    ProcessGroup,
    ServeOptions,
    Service,
    end_process,
    options_parser,
    prepare_mlx,
    serve,
)

from .channel import FollowerChannel, LeaderChannel
from .messages import Hello, ProcessStatus, RankFault, rank_name
from .report import Report

LOST = 75
"""Exit code of a rank that left because another was lost (`EX_TEMPFAIL`)."""
ORPHANED = 20.0
"""Seconds without a line of the supervisor's, who writes one each second."""
LEADER_LEAVES = 5.0
"""Seconds in which the leader's replies are written out, whatever its engine thread waits for."""
FOLLOWER_LEAVES = 2.0
"""Seconds in which a follower ends that has not heard, as it waits in a collective."""
STOP = b"stop"

Lead = Callable[[EngineSettings, Deliver, PluginRegistry, Any, LeaderChannel], Service]
"""The leader's service: settings, delivery, plugins, the `mx.distributed.Group`, the channel."""
Follow = Callable[[EngineSettings, PluginRegistry, Any, FollowerChannel], None]
"""Follows until the leader says that the group ends."""


def main(
    arguments: Sequence[str] | None = None, lead: Lead | None = None, follow: Follow | None = None
) -> int:
    """Run the rank that the environment names. Returns the exit code."""
    parser = options_parser("python -m mlx_provider_ranks.process", __doc__)
    parser.add_argument("--last-fault", type=RankFault.model_validate_json, help=argparse.SUPPRESS)
    parsed = vars(parser.parse_args(arguments))
    fault: RankFault | None = parsed.pop("last_fault")
    rank = int(os.environ["MLX_RANK"])
    threading.Thread(target=_obey, args=(rank,), name="supervised", daemon=True).start()
    if rank == 0:
        return _lead(parsed, fault, lead or import_module(".leader", __package__).lead)
    return _follow(rank, follow or import_module(".follower", __package__).follow)


def _lead(parsed: dict[str, Any], last: RankFault | None, lead: Lead) -> int:
    group = ProcessGroup(last_fault=_status(last))
    group.serving = Report(kind="serving", rank=0).tell
    group.refused = lambda error: Report.of(0, error).tell()

    def build(settings: EngineSettings, deliver: Deliver) -> Service:
        prepare_mlx()
        joined, registry, hello = _joined(settings)
        channel = LeaderChannel.open(joined, hello, lost)
        group.statuses = channel.statuses
        return lead(settings, deliver, registry, joined, channel)

    def lost(fault: RankFault) -> None:
        Report(kind="lost", rank=0, fault=fault).tell()
        _end_after(LEADER_LEAVES)
        group.lose(fault.error())

    code = serve(ServeOptions(**parsed, group=group), build)
    return LOST if group.error is not None else code


def _follow(rank: int, follow: Follow) -> int:
    # `mlx.launch` sends it when one rank has ended: report the lost rank first
    signal.signal(signal.SIGTERM, lambda *_: _end_after(FOLLOWER_LEAVES))
    channel: FollowerChannel | None = None
    lost: ProcessLost | None = None
    with Isolation() as trying:
        try:
            settings = engine_settings()
            log_to_stderr(settings.log_level, f"rank {rank}: ")
            prepare_mlx()
            group, registry, hello = _joined(settings)
            channel = FollowerChannel.join(group, hello, lambda fault: _left_alone(rank, fault))
            follow(settings, registry, group, channel)
            return 0
        except ProcessLost as error:  # not a fault of one request
            lost = error
    return _ended(rank, channel, lost, trying.fault)


def _ended(
    rank: int, channel: FollowerChannel | None, lost: ProcessLost | None, fault: Fault | None
) -> int:
    """A follower has failed: report it to the leader if there is one, or to the supervisor."""
    error: BaseException | None = lost
    why = "" if lost is None else lost.message
    if fault is not None:
        error, why = fault.error, fault.summary
        if not fault.ours:
            logging.getLogger(__name__).error("rank %d failed\n%s", rank, fault.trace)
    sys.stderr.write(printable(f"mlx-provider: rank {rank}: {why}") + "\n")
    if channel is not None:
        channel.failed(why)
        channel.close()
    elif isinstance(error, MLXProviderError):
        Report.of(rank, error).tell()
    return LOST if channel is not None else 1


def _joined(settings: EngineSettings) -> tuple[Any, PluginRegistry, Hello]:
    """Wait for all ranks. Returns the group, the plugins and this rank's `Hello`."""
    from .group import join  # imports MLX, so only after `prepare_mlx`

    registry = PluginRegistry.discover()
    group, hello = join(settings, registry)
    return group, registry, hello


def _left_alone(rank: int, fault: RankFault) -> None:
    """The leader is lost: report it and end."""
    Report(kind="lost", rank=rank, fault=fault).tell()
    _end_after(FOLLOWER_LEAVES)


def _end_after(seconds: float) -> None:
    timer = threading.Timer(seconds, end_process, (LOST,))
    timer.daemon = True
    timer.start()


def _obey(rank: int) -> None:
    """Obey the supervisor. End if it is silent."""
    while True:
        ready, _, _ = select.select([0], [], [], ORPHANED)
        data = os.read(0, 4096) if ready else b""
        if not data:
            break
        if rank == 0 and STOP in data:
            os.kill(os.getpid(), signal.SIGTERM)
    sys.stderr.write(f"mlx-provider: rank {rank} ends: its supervisor is gone\n")
    if rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LEADER_LEAVES)
    end_process(LOST)


def _status(fault: RankFault | None) -> ProcessStatus | None:
    if fault is None:
        return None
    return ProcessStatus(
        name=rank_name(fault.rank), host=fault.host, pid=0, device="", state="lost",
        since=fault.since, detail=fault.reason,
    )  # fmt: skip


if __name__ == "__main__":
    end_process(main())
