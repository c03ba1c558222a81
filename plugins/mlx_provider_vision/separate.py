"""A model that embeds each image separately, so that any prompt can reuse it."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_provider import Features, MediaItem, OnDemand, PrefillChunk, UnsupportedModel
from mlx_provider.families.logits import StateStore, last_token, narrow_output, rows_at
from mlx_provider.families.vision.loading import has_mrope
from mlx_provider.families.vision.model import Block, ExpandedItem, VisionFeatures, VisionModel
from mlx_provider.families.vision.patches import image_size

from . import passes
from .model import AnyVisionModel

MOST_KNOWN = 1024
"""Most images whose tokens are remembered."""
EMBEDDED = {"inputs_embeds", "position_ids", "rope_deltas"}
"""Arrays that mlx-vlm may return for a separate image. Any other means more than embeddings."""


@dataclass(frozen=True)
class ImageGrid:
    """One image of a prompt, for `rotary_positions`."""

    grid: tuple[int, ...]
    """Patches in time, height and width; empty: unknown."""
    merge: int  # patches per side that become one token


class SeparateVisionModel(AnyVisionModel):
    """Every image is a separate span, identified by its content. A `HiddenStatesModel`. Only for
    models in which `problem_of` of this plugin's `loading.py` finds no problem."""

    prepare = VisionModel.prepare
    make_cache = VisionModel.make_cache
    _prefill = staticmethod(passes.prefill_separately)
    _decode = staticmethod(passes.decode_separately)

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.mrope = has_mrope(self.model)
        self._known: dict[str, tuple[list[int], tuple[int, ...]]] = {}
        """Tokens and grid, by content hash."""
        vision = getattr(self.model.config, "vision_config", None)
        self._merge = int(getattr(vision, "spatial_merge_size", None) or 1)

    def expand(self, item: MediaItem) -> ExpandedItem:
        image_size(item)
        inputs = OnDemand(lambda: self.process(self.image_text, [item]))
        tokens, grid = self._known.get(item.content_hash) or _tokens_and_grid(inputs())
        self._known[item.content_hash] = tokens, grid
        while len(self._known) > MOST_KNOWN:
            self._known.pop(next(iter(self._known)), None)  # the oldest
        key = f"{item.content_hash}:{len(tokens)}:{grid}"
        block = Block(len(tokens), key, ImageGrid(grid, self._merge), inputs, tokens)
        return ExpandedItem(self.image_text, (block,))

    def features_of(self, made: dict[str, mx.array]) -> Features:
        """Raises `UnsupportedModel` if an image is more than rows of embeddings."""
        if more := made.keys() - EMBEDDED:
            raise UnsupportedModel(f"its images are more than embeddings: {', '.join(more)}")
        return VisionFeatures(made["inputs_embeds"][0])

    @property
    def has_hidden_states(self) -> bool:
        return self.backbone is not None

    def prefill_hidden(self, chunk: PrefillChunk, last: int) -> tuple[mx.array, mx.array]:
        store = StateStore(last_token, lambda states: states[:, -last:])
        model = narrow_output(self.model, self.backbone, store)
        return self._prefill(model, chunk), store.hidden[0]

    def decode_hidden(
        self,
        tokens: mx.array,
        cache: list[Any],
        positions: mx.array,
        logits_at: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        store = StateStore(rows_at(logits_at))
        model = narrow_output(self.model, self.backbone, store)
        return self._decode(model, tokens, cache, positions), store.hidden[:, -1]


def _tokens_and_grid(inputs: dict[str, np.ndarray]) -> tuple[list[int], tuple[int, ...]]:
    grids = inputs.get("image_grid_thw")
    grid = () if grids is None else tuple(int(side) for side in grids[0])
    return inputs["input_ids"][0].astype(np.int32).tolist(), grid
