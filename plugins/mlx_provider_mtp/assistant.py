"""Gemma 4's assistants: a few layers that read the keys and values of the model itself.

Their class is mlx-vlm's (mlx_vlm/speculative/drafters/gemma4_assistant 0.7.10). An assistant keeps
nothing of a row. It sees the model's last state, and attends to what the model's last layer of each
kind has stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_provider import BadRequest
from mlx_provider.errors import MLXProviderError
from mlx_provider.families.checkpoint import read_json
from mlx_provider.records import DeviceTokens, DraftRow

from .checkpoint import read_all
from .drafting import Judged
from .weights import Named, load_into

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
NONE_GIVEN = "it needs a Gemma 4 assistant for this model: name its folder (draft_model)"
NO_KINDS = "the layers of the model are not those of Gemma 4"
MOST_LAYERS = 64
"""Of the assistant itself. Published ones have four."""


def problem(folder: Path | None, model: Any) -> str:
    """Why the checkpoint cannot guess for a loaded model; empty: it may. Reads no weights."""
    if folder is None:
        return NONE_GIVEN
    try:
        if read_json(folder / "config.json").get("model_type") not in MODEL_TYPES:
            return f"{folder} holds no Gemma 4 assistant"
        return _unlike(_module(folder).config, model)
    except MLXProviderError as error:
        return error.message


def _unlike(config: Any, model: Any) -> str:
    language, text = language_of(model.model), config.text_config
    kinds = {} if language is None else layers_by_kind(language)
    if language is None or not kinds:
        return NO_KINDS
    models = getattr(language, "args", None) or language.config  # mlx-lm's, mlx-vlm's
    pairs = {
        "hidden size": (config.backbone_hidden_size, models.hidden_size),
        "vocabulary": (text.vocab_size, model.info.vocab_size),
        **{
            name.replace("_", " "): (getattr(text, name), getattr(models, name, None))
            for name in ("head_dim", "global_head_dim", "sliding_window")
        },
    }
    for what, (one, other) in pairs.items():
        if one != other:
            return f"it was trained for another model: its {what} is {one}, here it is {other}"
    missing = set(text.layer_types) - kinds.keys()
    return f"it reads layers of a kind that the model has not: {min(missing)}" if missing else ""


def language_of(model: Any) -> Any:
    """The text model of mlx-lm's or mlx-vlm's whole one; `None`: it is neither."""
    language = getattr(model, "language_model", model)
    return language if hasattr(getattr(language, "model", None), "embed_tokens") else None


def layers_by_kind(language: Any) -> dict[str, int]:
    """The last layer of each kind that stores keys and values, by its place among the caches."""
    kinds = [getattr(layer, "layer_type", "") for layer in language.model.layers]
    stored = len(language.make_cache()) if hasattr(language, "make_cache") else len(kinds)
    return {kind: at for at, kind in enumerate(kinds[:stored]) if kind}


def _module(folder: Path) -> Any:
    """mlx-vlm's assistant without weights; nothing is computed. Raises `BadRequest` for a config
    that it cannot read."""
    from mlx_vlm.speculative.drafters.gemma4_assistant import Model, ModelConfig

    given = read_json(folder / "config.json")
    try:
        layers = given["text_config"]["num_hidden_layers"]
        if layers > MOST_LAYERS:
            summary = f"it has {layers} layers, at most {MOST_LAYERS} are served"
            raise BadRequest(summary, param="draft_model")
        return Model(ModelConfig.from_dict(given))
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadRequest(f"its config cannot be read: {error!r}", param="draft_model") from error


def drafting(folder: Path, model: Any, kv_bytes: int) -> AssistantDrafting:
    """The assistant of a folder, for a model that `problem` accepts, with the model's embedding. It
    stores no keys. Raises `BadRequest` where its weights do not fit."""
    language, module = language_of(model), _module(folder)
    tensors = module.sanitize(read_all(folder, language.model.norm.weight.dtype))
    load_into(module, tensors, language, Named("the assistant", "", "draft_model"))
    module.bind(model)
    kinds = {each: layers_by_kind(language)[each] for each in module.config.text_config.layer_types}
    return AssistantDrafting(module, f"the assistant in {folder.name}", kinds)


@dataclass(eq=False)
class LastGuess:
    tokens: DeviceTokens
    end: int
    """Tokens of the row before them."""


class AssistantDrafting:
    """A `Drafting` with passes of its own for each row."""

    def __init__(self, module: Any, name: str, kinds: Mapping[str, int]) -> None:
        """`name`: what it is, and of which checkpoint; `kinds`: places of the caches that it
        reads, by kind of layer."""
        self.module = module
        self.judged = Judged(name)
        self._kinds = kinds

    def propose(self, rows: Sequence[DraftRow]) -> list[Sequence[int]]:
        """Greedy guesses; nothing is waited for."""
        return [self._guess(row) for row in rows]

    def _guess(self, row: DraftRow) -> Sequence[int]:
        self._judge(row)
        stored = self._stored(row)
        if stored is None or row.hidden is None:
            return ()
        known = len(row.tokens) - 1
        # as mlx-vlm's generation does (mlx_vlm/speculative/mtp.py 0.7.10)
        self.module.set_shared_kv(stored, known, position=max(0, known - 1), kv_valid_len=known)
        drafts = self.module.draft_block(
            row.tokens[-1], row.hidden[-1:][None], None, 1 + row.wanted, _most_likely, greedy=True
        )
        mx.async_eval(drafts)  # type: ignore[no-untyped-call]
        guess = DeviceTokens(drafts)
        row.state = LastGuess(guess, len(row.tokens))
        return guess

    def _judge(self, row: DraftRow) -> None:
        last: LastGuess | None = row.state
        if last is not None and last.end < len(row.tokens):
            self.judged.add(last.tokens, row.tokens[last.end])
            row.state = None

    def _stored(self, row: DraftRow) -> dict[str, tuple[mx.array, mx.array]] | None:
        """Keys and values by kind of layer. `None`: the row's are stored in another way."""
        found = {}
        for kind, at in self._kinds.items():
            pair = None if row.cache is None else row.cache[at]
            if pair is None:
                return None
            found[kind] = pair  # of a window, mlx-vlm masks what is outside
        return found


def _most_likely(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1)
