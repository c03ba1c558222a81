"""Drafters that were trained for a model and read its states.

A checkpoint can contain one (multi-token prediction of Qwen3.5 and Qwen3-Next, dense and with
experts). For others (EAGLE-3, DFlash 2, Gemma 4's assistants), the operator names the folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_provider import BadRequest, LoadedModel, hookimpl
from mlx_provider.records import Drafter, DraftOptions

if TYPE_CHECKING:
    from mlx_provider.records import Drafting

mlx_provider_api = 1
NAME = "mtp"
RANK = 2
"""A trained head guesses better than what the text repeats."""
EAGLE3 = "eagle3"
DFLASH2 = "dflash2"
ASSISTANT = "assistant"
NAMED_RANK = 4
"""A folder that the operator names is tried first: as a head, then as a whole model, because the
folder of a head can look like that of a model."""
CONTEXT = 512
"""Tokens of a prompt whose states a named one reads: 12 MiB for three layers of 4,096 values in 16
bit."""


def refuses(folder: Path, model: LoadedModel, options: DraftOptions) -> str:
    """Why this checkpoint has no usable head, from its tensor names and config only."""
    from .checkpoint import problem
    from .head import NO_ATTENTION, NO_LANGUAGE, attention_layer, language_of

    language = language_of(getattr(model, "model", None))
    if language is None:
        return NO_LANGUAGE
    if found := problem(folder):
        return found
    return NO_ATTENTION if attention_layer(language) is None else ""


def start(folder: Path, model: LoadedModel, options: DraftOptions) -> Drafting:
    """Load the head. Raises `BadRequest` if its weights do not fit."""
    from .drafting import HeadDrafting
    from .followed_rows import kv_bytes
    from .head import load_head

    head, name = load_head(folder, model.model), f"the MTP head of {folder.name}"
    return HeadDrafting(head, name, kv_bytes=kv_bytes(options.room))


def kept(drafting: Drafting) -> int:
    """Maximum bytes of the keys, values and states of all rows that the head follows."""
    from .followed_rows import FollowedRows

    return drafting.kept_bytes if isinstance(drafting, FollowedRows) else 0


def shown(drafting: Drafting) -> Sequence[int]:
    """Layers of the model whose outputs the head reads."""
    from .dflash2 import BlockDrafting
    from .drafting import HeadDrafting

    if isinstance(drafting, BlockDrafting):
        return drafting.shown
    return drafting.head.shown if isinstance(drafting, HeadDrafting) else ()


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
    yield _named(EAGLE3, "any text model, by an EAGLE-3 head that was trained for it")
    yield _named(DFLASH2, "any text model, by a DFlash 2 drafter that was trained for it")
    serves = "Gemma 4, by an assistant that was trained for it"
    yield replace(_named(ASSISTANT, serves), reads_cache=True, context=1)


def _named(name: str, serves: str) -> Drafter:
    """The drafter in the module with that name. The operator names its checkpoint."""

    def refuses(folder: Path, model: LoadedModel, options: DraftOptions) -> str:
        problem: str = import_module(f".{name}", __name__).problem(options.model, model)
        return problem

    def start(folder: Path, model: LoadedModel, options: DraftOptions) -> Drafting:
        from .followed_rows import kv_bytes

        module = import_module(f".{name}", __name__)
        if options.model is None:
            raise BadRequest(module.NONE_GIVEN, param="draft_model")
        found: Drafting = module.drafting(options.model, model.model, kv_bytes(options.room))
        return found

    return Drafter(
        name,
        refuses,
        start,
        keeps=kept,
        hidden=True,
        layers=shown,
        context=CONTEXT,
        reads_draft_model=True,
        automatic=NAMED_RANK,
        serves=serves,
    )
