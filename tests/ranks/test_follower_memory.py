"""A rank that follows lets go of what rank 0 lets go of, whatever memory it has itself."""

from __future__ import annotations

from collections.abc import Collection

from mlx_provider.config import EngineSettings
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.replication import OneProcess
from mlx_provider.engine.request_log import Recorder
from mlx_provider.engine.worker import EngineWorker
from mlx_provider.registry import PluginRegistry
from mlx_provider.serving.model_cache import ModelCache
from mlx_provider.serving.split import Processes


class Follows(OneProcess):
    follows = True


class Kept(PrefixCache):
    def __init__(self) -> None:
        super().__init__(budget=lambda: 0)
        self.shrunk: list[int] = []

    def evict_to(self, bytes_: int, claimed: Collection[int] = ()) -> int:
        self.shrunk.append(bytes_)
        return 0


def shrunk(ranks: Processes) -> list[int]:
    worker = EngineWorker(lambda posts: None, lambda error: None)
    models = ModelCache(EngineSettings(), PluginRegistry(), worker, Recorder(), processes=ranks)
    models.prefixes._cache = kept = Kept()
    models.prefixes.shrink()
    models.prefixes.evict_to(7)
    models.prefixes._cache = None
    models.close()
    return kept.shrunk


def test_a_load_makes_room_by_the_memory_of_rank_0_alone() -> None:
    assert shrunk(Processes(Follows())) == [7]
    assert len(shrunk(Processes())) == 2
