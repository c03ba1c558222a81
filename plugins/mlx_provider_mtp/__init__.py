"""Drafts by heads that were trained for a model and read its states.

A checkpoint may bring one along (multi-token prediction of Qwen3.5 and Qwen3-Next, dense and with
experts), or the operator names the folder of one (EAGLE-3, DFlash 2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
NAMED_RANK = 4
"""A folder that the operator names is tried first: as a head, then as a whole model, because the
folder of a head can look like that of a model."""
CONTEXT = 512
"""Tokens of a prompt whose states a named one reads: 12 MiB for three layers of 4,096 values in 16
bit."""


def refuses(folder: Path, model: LoadedModel, options: DraftOptions) -> str:
    """Why this checkpoint has no head that can be used; from its names and config alone."""
    from .checkpoint import problem
    from .head import NO_ATTENTION, NO_LANGUAGE, attention_layer, language_of

    language = language_of(getattr(model, "model", None))
    if language is None:
        return NO_LANGUAGE
    if found := problem(folder):
        return found
    return NO_ATTENTION if attention_layer(language) is None else ""


def start(folder: Path, model: LoadedModel, options: DraftOptions) -> Drafting:
    """Read the head. Raises `BadRequest` where its weights do not fit."""
    from .drafting import HeadDrafting, kv_bytes
    from .head import load_head

    head, name = load_head(folder, model.model), f"the MTP head of {folder.name}"
    return HeadDrafting(head, name, kv_bytes=kv_bytes(options.room))


def kept(drafting: Drafting) -> int:
    """Bytes of the keys, values and states of all rows that the head may follow."""
    from .dflash2 import BlockDrafting
    from .drafting import HeadDrafting

    return drafting.kept_bytes if isinstance(drafting, (HeadDrafting, BlockDrafting)) else 0


def refuses_eagle3(folder: Path, model: LoadedModel, options: DraftOptions) -> str:
    """Why the folder that the operator names has no EAGLE-3 head for this model."""
    from .eagle3 import problem

    return problem(options.model, model)


def start_eagle3(folder: Path, model: LoadedModel, options: DraftOptions) -> Drafting:
    """Read the head. Raises `BadRequest` where its weights do not fit."""
    from .drafting import HeadDrafting, kv_bytes
    from .eagle3 import NONE_GIVEN, load_eagle3

    if options.model is None:
        raise BadRequest(NONE_GIVEN, param="draft_model")
    head = load_eagle3(options.model, model.model)
    name = f"the EAGLE-3 head in {options.model.name}"
    return HeadDrafting(head, name, kv_bytes=kv_bytes(options.room))


def refuses_dflash2(folder: Path, model: LoadedModel, options: DraftOptions) -> str:
    """Why the folder that the operator names has no DFlash 2 drafter for this model."""
    from .dflash2 import problem

    return problem(options.model, model)


def start_dflash2(folder: Path, model: LoadedModel, options: DraftOptions) -> Drafting:
    """Read the drafter. Raises `BadRequest` where its weights do not fit."""
    from .dflash2 import NONE_GIVEN, BlockDrafting, load_dflash2
    from .drafting import kv_bytes

    if options.model is None:
        raise BadRequest(NONE_GIVEN, param="draft_model")
    module = load_dflash2(options.model, model.model)
    name = f"the DFlash 2 drafter in {options.model.name}"
    return BlockDrafting(module, name, kv_bytes=kv_bytes(options.room))


def shown(drafting: Drafting) -> Sequence[int]:
    """Layers whose outputs a head reads."""
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
    yield Drafter(
        EAGLE3,
        refuses_eagle3,
        start_eagle3,
        keeps=kept,
        hidden=True,
        layers=shown,
        context=CONTEXT,
        reads_draft_model=True,
        automatic=NAMED_RANK,
        serves="any text model, by an EAGLE-3 head that was trained for it",
    )
    yield Drafter(
        DFLASH2,
        refuses_dflash2,
        start_dflash2,
        keeps=kept,
        hidden=True,
        layers=shown,
        context=CONTEXT,
        reads_draft_model=True,
        automatic=NAMED_RANK,
        serves="any text model, by a DFlash 2 drafter that was trained for it",
    )
