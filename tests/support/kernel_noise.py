"""The probe on deep random models, over kernels that round by the width of the batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_provider.engine.execution import batch_layout
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.records import LoadOptions
from mlx_provider.serving import probe, solo_rows
from mlx_provider.serving.probe import Probe
from replaced import Replaced
from tiny import build

LAYERS = 36
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64}
QMM = 1e-3
"""Share of noise that quantised matrix products of another width make at most."""
OUTPUTS = ("o_proj", "out_proj", "down_proj")
"""Ends of the names of layers whose products are added to hidden states."""
DIFFERS = "log-probabilities differ from solo"

Probed = Callable[..., Probe]
"""`NoisyDevice.probe`, with or without some of its arguments."""


@dataclass
class RoundingKernels:
    """Products in float32, rounded once; of a batch, with the noise of another order of sums."""

    noise: float = 0.0
    """In what is added to hidden states, as a share of its root mean square."""
    padded: float = 0.0
    """The same of masked attention alone: padding reorders sums where the batch does not."""
    calls: int = 0
    noisy: set[int] = field(default_factory=set)
    weights: dict[int, tuple[Any, mx.array]] = field(default_factory=dict)

    def linear(self, layer: Any, x: mx.array) -> mx.array:
        y = x.astype(mx.float32) @ self.expanded(layer)
        if self.noise and id(layer) in self.noisy and x.shape[0] * x.shape[1] > 1:
            scale = self.noise * mx.sqrt(mx.mean(mx.square(y), axis=-1, keepdims=True))
            y = y + scale * self.drawn(y)
        return y.astype(x.dtype)

    def expanded(self, layer: Any) -> mx.array:
        """Transposed, in float32."""
        if id(layer) not in self.weights:
            weight = layer["weight"]
            if isinstance(layer, nn.QuantizedLinear):
                scales, biases = (layer[n].astype(mx.float32) for n in ("scales", "biases"))
                weight = mx.dequantize(weight, scales, biases, layer.group_size, layer.bits)
            weight = weight.astype(mx.float32).T
            mx.eval(weight)
            self.weights[id(layer)] = layer, weight
        return self.weights[id(layer)][1]

    def drawn(self, array: mx.array) -> mx.array:
        self.calls += 1
        return mx.random.normal(array.shape, key=mx.random.key(self.calls))


@dataclass
class NoisyDevice:
    """Deep random models, and what the probe finds of them."""

    kernels: RoundingKernels
    folder: Path
    models: dict[Any, TextModel] = field(default_factory=dict)

    def model(self, seed: int, family: str = "qwen3", layers: int = LAYERS) -> TextModel:
        """In bfloat16; the odd ones are quantised to 4 bit."""
        key = seed, family, layers
        if key not in self.models:
            folder = self.folder / f"{family}-{seed}-{layers}"
            build(folder, family, seed=seed, num_hidden_layers=layers, **SIZES)
            self.models[key] = self._loaded(folder, quantised=bool(seed % 2))
        return self.models[key]

    def probe(
        self, model: TextModel, share: float = QMM, padded: float = 0.0, layouts: Sequence[str] = ()
    ) -> Probe:
        self.kernels.noise, self.kernels.padded, self.kernels.calls = share, padded, 0
        return probe.probe(model, model.make_cache, layouts or model.kv_layouts)

    def _loaded(self, folder: Path, *, quantised: bool) -> TextModel:
        model = load_text(folder, LoadOptions(dtype="bfloat16"))
        if quantised:
            nn.quantize(model.model, group_size=32, bits=4)
            mx.eval(model.model.parameters())
        layers = model.model.named_modules()
        self.kernels.noisy |= {id(layer) for name, layer in layers if name.endswith(OUTPUTS)}
        return model


@contextmanager
def noisy_device(folder: Path) -> Iterator[NoisyDevice]:
    """Until its end every model of this process runs on such kernels. Models are kept in `folder`.

    What a model's rows give alone is computed once.
    """
    own = RoundingKernels()
    exact = mx.fast.scaled_dot_product_attention
    known: dict[Any, Any] = {}

    def attention(queries: mx.array, keys: mx.array, values: mx.array, **more: Any) -> mx.array:
        found = exact(*(each.astype(mx.float32) for each in (queries, keys, values)), **more)
        if own.padded and isinstance(more.get("mask"), mx.array):
            found = found * (1 + own.padded * own.drawn(found))
        return found.astype(queries.dtype)

    def remembered(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(model: Any, make_cache: Any, tokens: list[int], *more: int) -> Any:
            key = original, id(model), own.noise, tuple(tokens)
            if key not in known:
                known[key] = original(model, make_cache, tokens, *more)
            return known[key]

        return call

    with Replaced() as patch:
        for kind in (nn.Linear, nn.QuantizedLinear):
            patch.setattr(kind, "__call__", lambda layer, x: own.linear(layer, x))
        patch.setattr(mx.fast, "scaled_dot_product_attention", attention)
        # Two groups of two rows each, as the lengths make that a device is probed with.
        patch.setattr(batch_layout, "SHORT", 16)
        patch.setattr(probe, "LENGTHS", (5, 11, 33, 40))
        for name in ("decoding_row", "chunked_row"):
            patch.setattr(solo_rows, name, remembered(getattr(solo_rows, name)))
        yield NoisyDevice(own, folder)


def keeps_the_best(found: Probe) -> bool:
    """Whether rows share groups, and passes with chunks, without a reservation."""
    return (found.layout, found.mixes, found.notes) == ("grouped", True, ())


def finds_layout_bug(probed: Probed, model: TextModel) -> bool:
    """Whether the model's rows decode alone, and why."""
    found = probed(model, layouts=("grouped", "solo"))
    return found.layout == "solo" and DIFFERS in found.notes[0]


def finds_chunk_bug(probed: Probed, model: TextModel) -> bool:
    """Whether its chunks have passes of their own, and why; rows are still grouped."""
    found = probed(model)
    assert found.layout == "grouped"
    return not found.mixes and DIFFERS in found.notes[0]
