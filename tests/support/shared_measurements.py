"""Models of equal files are measured once in a test process, wherever their folders are."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlx_provider.protocol.requests import ModelOptions
from mlx_provider.serving.calibration import Measured
from mlx_provider.serving.engine_builder import EngineBuilder, _KVCache
from mlx_provider.serving.weights import Weights


@contextmanager
def share_measurements() -> Iterator[None]:
    """For engines with the usual file of measurements, where the result of a first load of equal
    files is stored before a load. Where memory is limited, each load measures for itself."""
    original = EngineBuilder._measure
    known: dict[str, Measured] = {}

    def measure(
        builder: EngineBuilder, weights: Weights, kv: _KVCache, options: ModelOptions
    ) -> Measured:
        settings = builder._settings
        if settings.measurements != "auto" or settings.memory_limit is not None:
            return original(builder, weights, kv, options)
        plugins = builder._registry.plugins
        code = [f"{plugin} {builder._registry.sources(plugin)}" for plugin in plugins]
        key = repr((_digest(weights.key.folder), options, kv.name, kv.layouts, code))
        if key in known and builder._measurements.find(kv.key) is None:
            builder._measurements.keep(kv.key, known[key])
        return known.setdefault(key, original(builder, weights, kv, options))

    EngineBuilder._measure = measure  # type: ignore[method-assign]
    try:
        yield
    finally:
        EngineBuilder._measure = original  # type: ignore[method-assign]


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()
