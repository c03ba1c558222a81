"""Rank 0: the service that decides for all ranks."""

from __future__ import annotations

import mlx.core as mx

from mlx_provider.errors import MLXProviderError
from mlx_provider.replicas import EngineSettings, PluginRegistry
from mlx_provider.replicas.engine import ChatService, Processes
from mlx_provider.replicas.server import Deliver

from .channel import LeaderChannel
from .loading import LoadingRanks
from .sides import Leading


def lead(
    settings: EngineSettings,
    deliver: Deliver,
    registry: PluginRegistry,
    group: mx.distributed.Group,
    channel: LeaderChannel,
) -> ChatService:
    """The service of a connected group. If its engine thread dies, rank 0 ends."""

    def died(error: MLXProviderError) -> MLXProviderError:
        channel.leader_failed(error.message)
        return error if channel.fault is None else channel.fault.error()

    return ChatService(settings, deliver, registry, ranks_of(group, channel), died)


def ranks_of(group: mx.distributed.Group, channel: LeaderChannel) -> Processes:
    """All ranks of a connected group, for rank 0."""
    least = min(hello.memory_limit for hello in channel.hellos)
    return LoadingRanks(
        Leading(channel, group), group, least, channel.leader_failed, channel.wait_heard
    )
