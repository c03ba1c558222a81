"""Multi-token prediction: heads of Qwen3.5 and Qwen3-Next, dense and with experts."""

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
"""A trained head guesses better than prompt lookup."""


def refuses(folder: Path, model: LoadedModel, options: DraftOptions) -> str:
    """Reads only tensor names and config."""
    from .checkpoint import problem
    from .head import NO_ATTENTION, NO_LANGUAGE, attention_layer, language_of

    language = language_of(getattr(model, "model", None))
    if language is None:
        return NO_LANGUAGE
    if found := problem(folder):
        return found
    return NO_ATTENTION if attention_layer(language) is None else ""


def start(folder: Path, model: LoadedModel, options: DraftOptions) -> Drafting:
    """Raises `BadRequest` if the weights do not fit."""
    from .drafting import HeadDrafting, kv_bytes
    from .head import load_head

    return HeadDrafting(load_head(folder, model.model), kv_bytes=kv_bytes(options.room))


def kept_bytes(drafting: Drafting) -> int:
    from .drafting import HeadDrafting

    return drafting.kept_bytes if isinstance(drafting, HeadDrafting) else 0


@hookimpl
def mlx_drafters() -> Iterable[Drafter]:
    yield Drafter(
        NAME,
        refuses,
        start,
        keeps=kept_bytes,
        hidden=True,
        automatic=RANK,
        serves="MTP heads of Qwen3.5 and Qwen3-Next, where the checkpoint has kept them",
    )
