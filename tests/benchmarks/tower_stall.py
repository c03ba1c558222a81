"""`tower`: how long a stream waits while the image of another request runs through its tower."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from equipped import equipped
from mlx_provider import Features, LoadedModel, LoadOptions, MediaItem, MediaSpan
from mlx_provider.families.checkpoint import read_json
from mlx_provider.registry import PluginRegistry
from mlx_provider.testing.driver import new_engine, new_request, output_of
from mlx_provider_bench.report import surroundings
from tiny import build

TOWER = {"depth": 24, "hidden_size": 256, "intermediate_size": 1024, "num_heads": 4}
SIDE = 512
"""Of the image: 1,024 patches."""


@dataclass(frozen=True)
class Waited:
    """Seconds."""

    tower: str
    longest_gap: float
    first_token: float


@dataclass
class Whole:
    """The same model without slices."""

    inner: Any

    def __getattr__(self, name: str) -> Any:
        if name == "embed_in_slices":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def embed(self, span: MediaSpan) -> Features:
        return self.inner.embed(span)


def loaded(folder: Path) -> LoadedModel:
    config = read_json(build(folder / "shallow", "qwen3_vl") / "config.json")
    build(folder / "deep", "qwen3_vl", vision_config=config["vision_config"] | TOWER)
    family, _ = PluginRegistry.discover({}).family_for(config)
    return equipped(family.load(folder / "deep", LoadOptions()))


def waited(name: str, model: Any, image: MediaItem) -> Waited:
    """One stream, and a prompt with an image."""
    engine, stream = new_engine(model, max_chunk=512), new_request([30] * 8, max_tokens=4000)
    engine.submit(stream)
    while len(output_of(stream).tokens) < 20:
        engine.step()
    content = [{"type": "image"}, {"type": "text", "text": "what is this?"}]
    messages = [{"role": "user", "content": content}]
    prompt = model.prepare(messages, tools=[], media=[image], variables={})
    asked = new_request(prompt.tokens, max_tokens=1)
    asked.prompt = prompt
    began = time.perf_counter()
    engine.submit(asked)
    times: list[float] = [began]
    while not output_of(asked).tokens:
        before = len(output_of(stream).tokens)
        engine.step()
        if len(output_of(stream).tokens) > before:
            times.append(time.perf_counter())
    return Waited(name, round(_longest(times), 3), round(time.perf_counter() - began, 3))


def _longest(times: Sequence[float]) -> float:
    return max(after - before for before, after in pairwise(times))


def bench(repeats: int = 2) -> dict[str, Any]:
    pixels = np.random.default_rng(1).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    image = MediaItem.of("image", pixels, "image")
    with tempfile.TemporaryDirectory() as folder:
        model = loaded(Path(folder))
    found = [
        waited(name, each, image)
        for _ in range(repeats)
        for name, each in (("whole", Whole(model)), ("slices", model))
    ]
    return {
        "benchmark": "tower",
        **TOWER,
        **surroundings("float32"),
        "waited": [asdict(each) for each in found],
    }
