"""Multi-token prediction: heads of Qwen3.5 and Qwen3-Next, dense and with experts."""

from collections.abc import Iterable
from pathlib import Path

from mlx_provider import LoadedModel, hookimpl
from mlx_provider.records import Drafter, Drafting, DraftOptions

mlx_provider_api = 1
NAME = "mtp"
RANK = 2
"""A trained head guesses better than prompt lookup."""


def refuses(folder: Path, model: LoadedModel, options: DraftOptions) -> str:
    """Why a head cannot draft for the model; empty: it can. Reads only tensor names and config."""
    from .checkpoint import problem
    from .head import NO_ATTENTION, NO_LANGUAGE, attention_layer, language_of

    language = language_of(getattr(model, "model", None))
    if language is None:
        return NO_LANGUAGE
    if found := problem(folder):
        return found
    return NO_ATTENTION if attention_layer(language) is None else ""


def start(folder: Path, model: LoadedModel, options: DraftOptions) -> Drafting:
    """Load the head. Raises `BadRequest` if its weights do not fit the model."""
    from .drafting import HeadDrafting, kv_bytes
    from .head import load_head

    return HeadDrafting(load_head(folder, model.model), kv_bytes=kv_bytes(options.room))


def kept_bytes(drafting: Drafting) -> int:
    """Maximum bytes that the drafter and the engine keep for rows."""
    from .drafting import HeadDrafting

    return drafting.kept_bytes if isinstance(drafting, HeadDrafting) else 0


@hookimpl
def mlx_drafters() -> Iterable[Drafter]:
    serves = "MTP heads of Qwen3.5 and Qwen3-Next, where the checkpoint has kept them"
    yield Drafter(
        NAME, refuses, start, keeps=kept_bytes, hidden=True, automatic=RANK, serves=serves
    )
