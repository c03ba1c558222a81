"""Drafts by the head that a checkpoint brings along: multi-token prediction of Qwen3.5 and
Qwen3-Next, dense and with experts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_provider import LoadedModel, hookimpl
from mlx_provider.records import Drafter, DraftOptions

if TYPE_CHECKING:
    from mlx_provider.records import Drafting

mlx_provider_api = 1
NAME = "mtp"
RANK = 2
"""A trained head guesses better than what the text repeats."""


def refuses(folder: Path, model: LoadedModel, options: DraftOptions) -> str:
    """Why this checkpoint has no head that can be used; from its names and config alone."""
    from .checkpoint import problem
    from .head import NO_ATTENTION, attention_layer, language_of

    language = language_of(getattr(model, "model", None))
    if language is None:
        return "the model is not one of mlx-lm's or mlx-vlm's"
    if found := problem(folder):
        return found
    return NO_ATTENTION if attention_layer(language) is None else ""


def start(folder: Path, model: LoadedModel, options: DraftOptions) -> Drafting:
    """Read the head. Raises `BadRequest` where its weights do not fit."""
    from .drafting import KV_BYTES, KV_SHARE, HeadDrafting
    from .head import load_head

    most = KV_BYTES if options.room is None else min(KV_BYTES, options.room // KV_SHARE)
    return HeadDrafting(load_head(folder, model.model), folder.name, kv_bytes=most)


def kept(drafting: Drafting) -> int:
    """Bytes of the keys and values of all rows that the head may follow."""
    from .drafting import HeadDrafting

    return drafting.kv_bytes if isinstance(drafting, HeadDrafting) else 0


@hookimpl
def mlx_drafters() -> Iterable[Drafter]:
    yield Drafter(
        NAME,
        refuses,
        start,
        keeps=kept,
        hidden=True,
        automatic=RANK,
        serves="MTP heads of Qwen3.5 and Qwen3-Next, where the checkpoint has kept them",
    )
