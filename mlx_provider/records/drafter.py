"""Drafters: who guesses what a row will say next, so that one pass can check several tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np
    from numpy.typing import NDArray

    from .model import LoadedModel


@dataclass(eq=False)
class DraftRow:
    """One row for which drafts are wanted, as a drafter sees it."""

    tokens: list[int]
    """Prompt and reply so far; it grows. Of the last one no layer of the model has seen anything
    yet."""
    wanted: int = 0
    """Drafts that may be proposed at most, 1 to 7."""
    fresh: int = 0
    """Last tokens whose `hidden` the drafter is shown for the first time; at first some of the
    prompt's, too."""
    hidden: mx.array | None = None
    """(fresh, hidden size): the states before those tokens, from which the model has drawn them,
    where the drafter asks for them. A token is missing between two calls where nobody drafted."""
    state: Any = None
    """The drafter's own, from one call to the next."""
    salt: str = ""
    """Whose text it is. Drafts made of one tenant's text, and how fast their replies come, would
    tell another one of it: what a drafter remembers of a row may help rows of this salt alone."""


class Drafting(Protocol):
    """A drafter at work for one loaded model. Every call is on the engine thread."""

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Sequence[int] | None]:
        """Tokens that may follow each row's last one, in the order of `rows`; at most `wanted`.

        None at all: the row is asked for again after a while, the later the oftener. `None`: it is
        asked for again at the next step; whatever is computed must be as short as a step, so that
        a long prompt is read in pieces. A wrong guess costs time alone, a fault its drafts: nobody
        loses an answer.
        """


class Scoring(Protocol):
    """One prompt on its way through a scorer. Whoever drops it frees what it holds."""

    def advance(self) -> NDArray[np.float32] | None:
        """Run one more piece, and wait for it; once all is read, a score for each token, (tokens,).

        Tokens of higher scores matter more to what follows the prompt. Pieces end where they do
        whatever the time: a prompt must be scored alike in any company. Rows that decode wait
        meanwhile, so each is as short as a step. A fault costs the scores alone: the prompt is then
        prefilled whole.
        """


@runtime_checkable
class ScoresPrompts(Protocol):
    """A `Drafting` that knows which tokens of a prompt matter, for sparse prefill."""

    @property
    def longest_scored(self) -> int:
        """Tokens of a prompt that it can score at most."""

    @property
    def scored_token_bytes(self) -> int:
        """Bytes of memory that each of them takes until all are scored."""

    def scoring(self, tokens: Sequence[int]) -> Scoring:
        """Begin with a prompt; nothing is computed yet."""


@dataclass(frozen=True)
class DraftOptions:
    """What the operator says about drafts."""

    model: Path | None = None
    """The folder of a smaller model of the same vocabulary."""
    room: int | None = None
    """Bytes that there are for what a drafter loads and keeps; `None`: as many as it will."""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Drafter:
    """A way to draft."""

    name: str
    refuses: Callable[[Path, LoadedModel, DraftOptions], str]
    """(the checkpoint's folder, the model in memory, options) -> why it cannot draft for it, in
    one line for the operator; empty: it can. Reads no weights."""
    start: Callable[[Path, LoadedModel, DraftOptions], Drafting]
    """Get ready (engine thread). Raises errors of `mlx_provider.errors`."""
    keeps: Callable[[Drafting], int] = field(default=lambda drafting: 0)
    """Bytes that what it keeps of rows may come to take, beside what `start` has loaded."""
    hidden: bool = False
    """It must be shown hidden states: the model has to be a `ShowsHidden`."""
    media: bool = True
    """It may draft for prompts that hold images."""
    automatic: int = 0
    """Rank among those taken where the operator names none; 0: never."""
    serves: str = ""
    """One line for people."""
