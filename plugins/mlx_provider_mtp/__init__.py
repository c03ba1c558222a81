"""Drafts by heads that were trained for a model and read its states.

A checkpoint may bring one along (multi-token prediction of Qwen3.5 and Qwen3-Next, dense and with
experts), or the operator names the folder of one (EAGLE-3)."""

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
NAMED_RANK = 4
"""What the operator names goes first, and a head before a whole model: its folder may pass for one.
"""
CONTEXT = 512
"""Tokens of a prompt whose states it reads. Three layers of 4,096 values in 16 bit are 12 MiB."""


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
    from .drafting import HeadDrafting, kv_bytes
    from .head import load_head

    head, name = load_head(folder, model.model), f"the MTP head of {folder.name}"
    return HeadDrafting(head, name, kv_bytes=kv_bytes(options.room))


def kept(drafting: Drafting) -> int:
    """Bytes of the keys, values and states of all rows that the head may follow."""
    from .drafting import HeadDrafting

    return drafting.kept_bytes if isinstance(drafting, HeadDrafting) else 0


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


def shown(drafting: Drafting) -> Sequence[int]:
    """Layers whose outputs a head reads."""
    from .drafting import HeadDrafting

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
