"""Drafters guess the next tokens of a row, so that one pass can check several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, overload, runtime_checkable

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np
    from numpy.typing import NDArray

    from .model import LoadedModel

MOST_DRAFTS = 7
"""Most drafts of a row in one pass: fused attention accepts at most 8 queries (Metal, mlx
0.32.4)."""


class DeviceTokens(Sequence[int]):
    """Drafts on the device, read when one of them is asked for.

    The engine gives them to the model unread, so that the device need not wait for the host.
    """

    def __init__(self, array: mx.array) -> None:
        """`array`: (n,) of integers; it may still be computed."""
        self.array = array.reshape(-1)
        self._read: list[int] | None = None

    def __len__(self) -> int:
        return self.array.size

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if self._read is None:
            self._read = self.array.tolist()  # type: ignore[assignment]
        return self._read[at]  # type: ignore[index]

    def first(self, count: int) -> DeviceTokens:
        """At most so many of them, unread."""
        return self if len(self) <= count else DeviceTokens(self.array[:count])


@dataclass(eq=False)
class DraftRow:
    """A row for which drafts are wanted."""

    tokens: list[int]
    """Prompt and reply so far; the list grows. The model has not seen the last token yet."""
    wanted: int = 0
    """Maximum number of drafts, 1 to 7."""
    fresh: int = 0
    """Number of last tokens with new `hidden` states; in the first call, some of the prompt's, too.
    """
    hidden: mx.array | None = None
    """(fresh, hidden size), if the drafter asks for them: the states from which the model drew
    those tokens. A token between two calls is missing if no row had a draft then. Gone after
    the call."""
    state: Any = None
    """Kept for the drafter from one call to the next."""
    salt: str = ""
    """The tenant of the text. Drafts made from one tenant's text, and the speed of their replies,
    would tell another tenant about it: use what is remembered of a row only for rows of the same
    salt."""


class Drafting(Protocol):
    """A drafter at work for one loaded model. Every call is on the engine thread."""

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Sequence[int] | None]:
        """Tokens that may follow each row's last one, in the order of `rows`; at most `wanted`.

        An empty list: the row is asked for again later, after a rest that grows. `None`: it is
        asked for again at the next step. `DeviceTokens` need not be computed yet. Compute no longer
        than a step takes: read a long prompt in pieces. A wrong guess costs only time, and a fault
        costs only the drafts.
        """


class Scoring(Protocol):
    """One prompt in a scorer. Dropping it frees its memory."""

    def advance(self) -> NDArray[np.float32] | None:
        """Run one piece and wait for it. After the last one, returns a score for each token,
        (tokens,).

        Tokens with higher scores matter more for the reply. Pieces must not depend on time, so that
        a prompt has the same scores in any batch. Rows that decode wait, so make each piece as
        short as a step. After a fault, the whole prompt is prefilled.
        """


@runtime_checkable
class ScoresPrompts(Protocol):
    """A `Drafting` that scores the tokens of a prompt for sparse prefill."""

    @property
    def longest_scored(self) -> int:
        """Maximum length of a prompt in tokens."""

    @property
    def scored_token_bytes(self) -> int:
        """Bytes of memory per token until all are scored."""

    def scoring(self, tokens: Sequence[int]) -> Scoring:
        """Start a prompt; computes nothing yet."""


@dataclass(frozen=True)
class DraftOptions:
    """The operator's options for drafts."""

    model: Path | None = None
    """The folder of a smaller model of the same vocabulary."""
    room: int | None = None
    """Bytes of memory for the drafter; `None`: no limit."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    scores: bool = False
    """Sparse prefill is on: a model that can only score prompts (`ScoresPrompts`) may start."""


@dataclass(frozen=True)
class Drafter:
    name: str
    refuses: Callable[[Path, LoadedModel, DraftOptions], str]
    """(folder of the checkpoint, loaded model, options) -> why it cannot draft for the model, on
    one line for the operator; empty: it can. Reads no weights."""
    start: Callable[[Path, LoadedModel, DraftOptions], Drafting]
    """Load it (engine thread). Raises errors of `mlx_provider.errors`."""
    keeps: Callable[[Drafting], int] = field(default=lambda drafting: 0)
    """Maximum bytes that it keeps for rows, in addition to what `start` has loaded."""
    hidden: bool = False
    """It needs hidden states: the model must be a `ShowsHidden`."""
    media: bool = True
    """It can draft for prompts with images."""
    reads_draft_model: bool = False
    """It drafts with the folder of `DraftOptions.model`. If the operator names a folder that no
    such drafter takes, the log shows the reasons of all of them."""
    automatic: int = 0
    """Rank of the drafter if the operator names none; 0: never taken."""
    serves: str = ""
    """One line for people."""
