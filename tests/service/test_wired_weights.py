"""Only weights are wired, from the load of a model until it is unloaded."""

import gc
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_provider.serving import weight_files

GB = 2**30


class FakeMetal:
    """Records the calls of `mlx.core`, in order."""

    def __init__(self, memory: int) -> None:
        self.calls: list[object] = []
        self.memory = memory
        self.metal = SimpleNamespace(is_available=lambda: memory > 0)

    def device_info(self) -> dict[str, int]:
        return {
            "memory_size": self.memory,
            "max_recommended_working_set_size": self.memory * 3 // 4,
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)

    def clear_cache(self) -> None:
        self.calls.append("clear")

    def set_wired_limit(self, limit: int) -> None:
        self.calls.append(limit)


def fake(monkeypatch: pytest.MonkeyPatch, memory: int) -> FakeMetal:
    metal = FakeMetal(memory)
    monkeypatch.setattr(weight_files, "mx", metal)
    return metal


@pytest.mark.parametrize(
    ("memory", "calls"),
    [(64, ["clear", int(0.65 * 64 * GB)]), (16, ["clear", 8 * GB]), (8, ["clear", 0]), (0, [])],
)
def test_some_memory_is_never_wired(
    memory: int, calls: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    metal = fake(monkeypatch, memory * GB)
    weight_files.wire(100 * GB)
    assert metal.calls == calls, "none without Metal"


def test_a_model_is_wired_from_its_load_until_it_is_unloaded(
    own_model: Any, build_tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    metal = fake(monkeypatch, 64 * GB)
    folders = [build_tiny("qwen3", seed=i, intermediate_size=1024) for i in range(2)]
    size = (folders[0] / "model.safetensors").stat().st_size
    model = own_model(folders[0], memory_limit=int(1.9 * size))
    gc.collect()  # what other tests have left must not become free during the load
    for folder in folders:
        model.beside(folder).ask(max_tokens=1)
    first, second = (call for call in metal.calls if isinstance(call, int) and call)
    assert metal.calls == ["clear", first, "clear", 0, "clear", second]
    assert 0.9 * size < first  # the file also has a header
