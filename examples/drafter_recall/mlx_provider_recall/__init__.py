"""A drafter that guesses what the model has said before, in any reply to the same tenant."""

from collections.abc import Iterator
from pathlib import Path

from mlx_provider import LoadedModel, hookimpl
from mlx_provider.records import Drafter, Drafting, DraftOptions

mlx_provider_api = 1


def refuses(folder: Path, model: LoadedModel, options: DraftOptions) -> str:
    """It can draft for any model; empty: it does."""
    return ""


def start(folder: Path, model: LoadedModel, options: DraftOptions) -> Drafting:
    """Nothing to load. Where there is little room, less is remembered."""
    from .recall import MOST_TOKENS, TOKEN_BYTES, Recall

    return Recall(
        MOST_TOKENS if options.room is None else min(MOST_TOKENS, options.room // TOKEN_BYTES)
    )


def keeps(drafting: Drafting) -> int:
    """Bytes of all that it may remember."""
    from .recall import TOKEN_BYTES, Recall

    return drafting.most * TOKEN_BYTES if isinstance(drafting, Recall) else 0


@hookimpl
def mlx_drafters() -> Iterator[Drafter]:
    """`automatic` is 0: whoever wants it names it."""
    yield Drafter(
        "recall", refuses, start, keeps=keeps, serves="any model, by what it has said before"
    )
