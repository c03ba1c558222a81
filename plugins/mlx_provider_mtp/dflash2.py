"""DFlash 2: guesses a block of tokens in one pass, from what some layers of a model put out.

Its classes are mlx-vlm's (mlx_vlm/speculative/drafters/dflash2 0.7.10). The keys and values of a
row's states lie in caches of mlx-vlm with a window; those of a block are not stored, so that
nothing is taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

import mlx.core as mx

from mlx_provider import BadRequest
from mlx_provider.errors import MLXProviderError
from mlx_provider.families.checkpoint import read_json
from mlx_provider.records import DeviceTokens, DraftRow

from .checkpoint import read_all
from .drafting import KV_BYTES, UNASKED, Judged
from .head import NO_LANGUAGE, language_of
from .weights import Named, load_into

CLASS = "DFlash2DraftModel"
NONE_GIVEN = "it needs a DFlash 2 checkpoint for this model: name its folder (draft_model)"
WINDOW = 1024
"""Tokens of a row whose states it looks back on, if its config names no window."""
LONGEST = 1536
"""Tokens that the caches of a row store at most: the window, and the states of a whole prompt."""
MOST_LAYERS = 64
"""Of the drafter itself. Published ones have five to eight."""


def problem(folder: Path | None, model: Any) -> str:
    """Why the checkpoint cannot guess for a loaded model; empty: it may. Reads no weights."""
    if folder is None:
        return NONE_GIVEN
    try:
        if CLASS not in (read_json(folder / "config.json").get("architectures") or []):
            return f"{folder} holds no DFlash 2 drafter"
        language = language_of(model.model)
        if language is None:
            return NO_LANGUAGE
        return _unlike(_module(folder).config, language, model.info.vocab_size)
    except MLXProviderError as error:
        return error.message


def _unlike(config: Any, language: Any, vocab: int) -> str:
    pairs = {
        "hidden size": (config.hidden_size, language.args.hidden_size),
        "vocabulary": (config.vocab_size, vocab),
        "number of layers": (config.num_target_layers, len(language.model.layers)),
    }
    for what, (own, models) in pairs.items():
        if own != models:
            return f"it was trained for another model: its {what} is {own}, here it is {models}"
    return ""


def _module(folder: Path) -> Any:
    """mlx-vlm's drafter without weights; nothing is computed. Raises `BadRequest` for a config
    that it cannot read."""
    from mlx_vlm.speculative.drafters.dflash2 import Model, ModelConfig

    given = read_json(folder / "config.json")
    try:
        if given["num_hidden_layers"] > MOST_LAYERS:  # mlx-vlm lists them in its config
            summary = (
                f"it has {given['num_hidden_layers']} layers, at most {MOST_LAYERS} are served"
            )
            raise BadRequest(summary, param="draft_model")
        config = ModelConfig.from_dict(given)
        config.draft_window_size = min(WINDOW, config.draft_window_size or WINDOW)
        return Model(config)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadRequest(f"its config cannot be read: {error!r}", param="draft_model") from error


def load_dflash2(folder: Path, model: Any) -> Any:
    """mlx-vlm's drafter of a folder, for a model of mlx-lm or mlx-vlm that `problem` accepts, with
    the model's embedding and output matrix. Raises `BadRequest` where its weights do not fit."""
    from mlx_vlm.speculative.drafters import DFlashDraftModel

    language, module = language_of(model), _module(folder)
    tensors = module.sanitize(read_all(folder, language.model.norm.weight.dtype))
    load_into(module, tensors, language, Named("the DFlash 2 drafter", "", "draft_model"))
    DFlashDraftModel.bind(module, model)  # that of DFlash 2 wants a cache that mlx-vlm rolls back
    return module


@dataclass(eq=False)
class Seen:
    """What the drafter has seen of one row."""

    caches: list[Any]
    end: int | None = None
    """Tokens of the row up to the last state."""
    guess: DeviceTokens | None = None


class BlockDrafting:
    """A `Drafting` with one pass for each row."""

    def __init__(self, module: Any, name: str, *, kv_bytes: int = KV_BYTES) -> None:
        """`name`: what it is, and of which checkpoint; `kv_bytes`: for keys and values of all
        rows."""
        self.module = module
        self.judged = Judged(name)
        self.shown: Sequence[int] = tuple(module.config.target_layer_ids)
        """Layers of the model whose outputs it reads."""
        weight = module.norm.weight
        states = mx.zeros((1, len(self.shown) * weight.shape[0]), weight.dtype)
        trial = Seen(module.make_cache())
        mx.eval(self._block(trial, states, 0, 1))  # what mlx-vlm keeps of weights, it keeps now
        each = LONGEST * sum(
            (cache.keys.nbytes + cache.values.nbytes) // cache.keys.shape[2]
            for cache in trial.caches
        )
        self._places = max(1, kv_bytes // each)
        self.kept_bytes = self._places * each + UNASKED * states.nbytes
        """That keys and values of all followed rows take at most, and states that the engine keeps
        until it asks."""
        self._followed: WeakSet[Seen] = WeakSet()
        """Of the rows that the engine still knows."""

    def propose(self, rows: Sequence[DraftRow]) -> list[Sequence[int]]:
        """Greedy guesses; nothing is waited for."""
        return [self._guess(row) for row in rows]

    def _guess(self, row: DraftRow) -> Sequence[int]:
        if not row.fresh or row.hidden is None or not self._room(row):
            return ()
        seen: Seen = row.state
        begin = len(row.tokens) - 1 - row.fresh
        if seen.end is not None:
            if seen.guess is not None and seen.end + 1 < len(row.tokens):
                self.judged.add(seen.guess, row.tokens[seen.end + 1])
            for cache in seen.caches:  # tokens without states keep their places
                cache.offset += begin - seen.end
        wanted = min(row.wanted, self.module.config.block_size - 1)
        drafts = self._block(seen, row.hidden, row.tokens[-1], wanted)
        mx.async_eval(drafts)  # type: ignore[no-untyped-call]
        seen.end, seen.guess = len(row.tokens) - 1, DeviceTokens(drafts)
        return seen.guess

    def _room(self, row: DraftRow) -> bool:
        """Whether the row is followed, from now on if need be."""
        if row.state is None and len(self._followed) < self._places:
            row.state = Seen(self.module.make_cache())
            self._followed.add(row.state)
        return row.state is not None

    def _block(self, seen: Seen, hidden: mx.array, last: int, wanted: int) -> mx.array:
        """(1, wanted) guesses behind the token `last`, which was drawn from the last of the new
        states (n, width)."""
        found: mx.array = self.module.draft_block(
            last, hidden[None], seen.caches, 1 + wanted, _most_likely
        )
        return found


def _most_likely(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1)


def drafting(folder: Path, model: Any, kv_bytes: int) -> BlockDrafting:
    """See `load_dflash2` and `BlockDrafting`."""
    name = f"the DFlash 2 drafter in {folder.name}"
    return BlockDrafting(load_dflash2(folder, model), name, kv_bytes=kv_bytes)
