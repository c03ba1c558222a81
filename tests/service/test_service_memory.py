"""The memory limit's parts: weights and rows, MLX's free buffers, the prefix cache."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_provider.serving.model_cache import ModelCache
from mlx_provider.serving.residents import MemoryLedger
from mlx_provider.serving.row_ledger import ProcessMemory

GIGA = 2**30


def models(make_service: Any, **settings: Any) -> ModelCache:
    service, _ = make_service(**settings)
    found: ModelCache = service.models
    return found


def test_the_pool_of_free_buffers_is_limited_and_counted(
    make_service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    limits = [123]
    monkeypatch.setattr(mx, "set_cache_limit", lambda n: (limits.append(n), limits[-2])[1])
    served = models(make_service, memory_limit=16 * GIGA)
    assert limits == [123, GIGA]
    assert served.ledger.free == served.ledger.limit == 15 * GIGA
    served.close()
    assert limits == [123, GIGA, 123]


def test_the_prefix_cache_leaves_a_share_for_other_uses(make_service: Any) -> None:
    """Unless its size is chosen."""

    def budget(**settings: Any) -> int:
        return models(make_service, **settings).ledger.prefix_budget()

    assert budget(memory_limit=30 * GIGA) == 20 * GIGA
    assert budget(memory_limit=3 * GIGA) == 2 * GIGA
    assert budget(memory_limit=30 * GIGA, prefix_bytes=20 * GIGA) == 20 * GIGA
    assert budget(memory_limit=30 * GIGA, prefix_bytes=40 * GIGA) == 30 * GIGA


@dataclass
class Busy:
    """A model of 6 GB with rows of a given size."""

    live_bytes: int
    nbytes: int = 6 * GIGA


def test_the_prefix_cache_can_use_the_memory_that_rows_leave() -> None:
    ledger: MemoryLedger = MemoryLedger(lambda: 36 * GIGA)
    resident = ledger.add("model", 6 * GIGA)
    for live, left in ((0, 20), (9, 20), (10, 20), (16, 14), (30, 0), (31, 0)):
        resident.model = Busy(live * GIGA)
        assert ledger.prefix_budget() == left * GIGA


def test_the_prefix_cache_gives_back_a_share(own_model: Any, qwen: Any) -> None:
    model = own_model(qwen.model)
    model.ask("Tell me a story", max_tokens=4)
    service = model.service
    prefixes = service.models.prefixes
    before = prefixes.nbytes
    service.prefixes.keep_share(1.0)
    service.prefixes.report()  # waits for the engine thread
    assert prefixes.nbytes == before > 0
    service.prefixes.keep_share(0.0)
    service.prefixes.report()
    assert prefixes.nbytes == 0


def test_measurements_use_the_memory_that_weights_rows_and_images_leave() -> None:
    """The prefix cache and other models free memory for them."""
    ledger: MemoryLedger = MemoryLedger(lambda: 36 * GIGA, media_bytes=lambda: GIGA)
    for name, live in (("model", 0), ("other", 9)):
        ledger.add(name, 6 * GIGA).model = Busy(live * GIGA)
    assert ledger.unused_bytes == 14 * GIGA
    assert [ledger.live_bytes(name) for name in ("model", "other")] == [9 * GIGA, 0]
    evicted: list[int] = []
    prefixes: Any = SimpleNamespace(evict_to=evicted.append)
    process = ProcessMemory(ledger, None, prefixes, None)  # type: ignore[arg-type]
    assert not process.reserve(15 * GIGA)
    assert process.reserve(13 * GIGA)
    assert process.reserve(14 * GIGA)  # replaces the 13
    assert evicted == [GIGA, 0]
