"""The ranks of this process: joined by collectives first, by the control channel then."""

from __future__ import annotations

import mlx.core as mx

from ..config import EngineSettings
from ..engine.memory import memory_limit
from ..registry import PluginRegistry
from ..serving.service import device_name
from ..serving.split import Ranks
from .agreed import Leading
from .channel import FollowerChannel, LeaderChannel, Lost
from .follower import Follower
from .hello import own_hello
from .messages import Hello


def lead(
    settings: EngineSettings, registry: PluginRegistry, lost: Lost
) -> tuple[Ranks, LeaderChannel]:
    """Wait for all other ranks, as rank 0; see `LeaderChannel.open`."""
    group = mx.distributed.init(strict=True)
    channel = LeaderChannel.open(group, _hello(group, settings, registry), lost)
    least = min(hello.memory_limit for hello in channel.hellos)
    return Ranks(
        Leading(channel, group), group, channel.leader_failed, channel.wait_heard, least
    ), channel


def follow(settings: EngineSettings, registry: PluginRegistry, lost: Lost | None = None) -> None:
    """Be another rank until rank 0 is gone.

    Raises `RankLost`, `RanksDiffer`, and whatever a pass raises, which rank 0 is told.
    """
    group = mx.distributed.init(strict=True)
    channel = FollowerChannel.join(group, _hello(group, settings, registry), lost)
    Follower(settings, registry, channel, group).run()


def _hello(
    group: mx.distributed.Group, settings: EngineSettings, registry: PluginRegistry
) -> Hello:
    limit = memory_limit(settings.memory_limit)
    return own_hello(group.rank(), registry, device_name(), limit)
