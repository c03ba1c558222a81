"""Drafters for any model: prompt lookup, and a smaller model."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from mlx_provider import LoadedModel, hookimpl
from mlx_provider.records import Drafter, Drafting, DraftOptions, DraftRow

mlx_provider_api = 1


class ForcedText:
    """Drafts nothing itself: with any drafter, the core drafts the text that a grammar forces."""

    def propose(self, rows: Sequence[DraftRow]) -> list[Sequence[int]]:
        return [() for _ in rows]


@hookimpl
def mlx_drafters() -> Iterator[Drafter]:
    """The drafter `model` comes first: the operator has chosen its model."""
    yield Drafter(
        "model",
        refuses_model,
        start_model,
        keeps=kept_by_model,
        media=False,
        reads_draft_model=True,
        automatic=3,
        serves="any model, by a smaller one of the same vocabulary",
    )
    yield Drafter(
        "lookup",
        lambda folder, model, options: "",
        start_lookup,
        automatic=1,
        serves="any model, by what followed the same words in the prompt or the reply",
    )
    yield Drafter(
        "grammar",
        lambda folder, model, options: "",
        lambda folder, model, options: ForcedText(),
        serves="any model, by the text that a grammar forces and nothing else",
    )


def refuses_model(folder: Path, model: LoadedModel, options: DraftOptions) -> str:
    """Why the smaller model in `options` cannot draft for `model`; empty: it can."""
    from .draft_model import refusal

    return refusal(folder, options.model, options.room)


def start_model(folder: Path, model: LoadedModel, options: DraftOptions) -> Drafting:
    """Load the smaller model. Raises `BadRequest` if it can only score, and `scores` is off."""
    from .draft_model import load_draft_model

    return load_draft_model(
        options.model, model.info.vocab_size, options.room, scores=options.scores
    )


def kept_by_model(drafting: Drafting) -> int:
    """Maximum bytes of the smaller model's caches."""
    from .draft_model import DraftModel

    return drafting.kv_bytes if isinstance(drafting, DraftModel) else 0


def start_lookup(folder: Path, model: LoadedModel, options: DraftOptions) -> Drafting:
    from .lookup import Lookup

    return Lookup()
