"""Joins this process to a group: first by collectives, then by the control channel."""

from __future__ import annotations

import mlx.core as mx

from mlx_provider.errors import ProcessLost
from mlx_provider.replicas import EngineSettings, PluginRegistry
from mlx_provider.replicas.engine import Processes, device_name, memory_limit

from .channel import FollowerChannel, LeaderChannel, Lost
from .follower import Follower
from .hello import own_hello
from .leader import ranks_of
from .messages import Hello


def join(settings: EngineSettings, registry: PluginRegistry) -> tuple[mx.distributed.Group, Hello]:
    """Wait for all ranks. Returns the group and this rank's `Hello`. Raises `ProcessLost`."""
    try:
        group = mx.distributed.init(strict=True)
    except RuntimeError as error:
        raise ProcessLost(f"this rank found no group: {error}") from None
    limit = memory_limit(settings.memory_limit)
    return group, own_hello(group.rank(), registry, device_name(), limit)


def lead(
    settings: EngineSettings, registry: PluginRegistry, lost: Lost
) -> tuple[Processes, LeaderChannel]:
    """Wait for all other ranks on rank 0; see `LeaderChannel.open`."""
    group, hello = join(settings, registry)
    channel = LeaderChannel.open(group, hello, lost)
    return ranks_of(group, channel), channel


def follow(settings: EngineSettings, registry: PluginRegistry, lost: Lost | None = None) -> None:
    """Run another rank until rank 0 ends.

    Raises `ProcessLost`, `RanksDiffer`, and the errors of passes.
    """
    group, hello = join(settings, registry)
    channel = FollowerChannel.join(group, hello, lost)
    Follower(settings, registry, channel, group).run()
