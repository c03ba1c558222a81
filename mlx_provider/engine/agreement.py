"""What one rank decides and all ranks do, where a model is split over several.

Every rank runs the same engine code on the same requests, each with its own share of the model.
Whatever is not the same everywhere by itself (times, free memory, grammars, texts, drafts, tokens
that were drawn) comes from rank 0: the others hear it at the same place of the same code. An engine
alone asks nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import mlx.core as mx

from ..isolation import Fault
from ..records import Features, LoadedModel
from .execution.sampler import Drawn

T = TypeVar("T")


class Agreement(Protocol):
    """Every method belongs to the engine thread. Values that are told can be written as JSON."""

    @property
    def follows(self) -> bool:
        """Whether this rank does what another one decides."""

    def named(self, engine: str) -> Agreement:
        """The same of one engine: a rank may have several."""

    def on(
        self,
        kind: str,
        make: Callable[[], T],
        told: Callable[[T], Any],
        heard: Callable[[Any], T],
    ) -> T:
        """A decision of this kind: what rank 0 makes, which others hear.

        `make` runs on rank 0 alone. Raises `RankLost` where ranks cannot be heard, or are not at
        the same place.
        """

    def tell(self, kind: str, told: Callable[[], dict[str, Any]]) -> None:
        """Something happened on rank 0 that others take notice of before they next hear."""

    def of_all(self, own: Any) -> list[Any]:
        """What each rank has of its own, in their order: a collective, where all pass by."""

    def drawn(self, logits: mx.array, make: Callable[[], Drawn]) -> Drawn:
        """Tokens (B,) that rank 0 draws from logits (B, vocab), on every rank's device."""

    def features(self, model: LoadedModel, make: Callable[[], Features]) -> Features:
        """Of one media item, which rank 0 embeds. Raises what that raises."""

    def failed(self, fault: Fault) -> None:
        """A pass failed here. Raises `RankLost` where other ranks wait in theirs."""


class Alone:
    """The agreement of an engine that has its model to itself."""

    follows = False

    def named(self, engine: str) -> Alone:
        return self

    def on(
        self,
        kind: str,
        make: Callable[[], T],
        told: Callable[[T], Any],
        heard: Callable[[Any], T],
    ) -> T:
        return make()

    def tell(self, kind: str, told: Callable[[], dict[str, Any]]) -> None:
        """Nobody listens."""

    def of_all(self, own: Any) -> list[Any]:
        return [own]

    def drawn(self, logits: mx.array, make: Callable[[], Drawn]) -> Drawn:
        return make()

    def features(self, model: LoadedModel, make: Callable[[], Features]) -> Features:
        return make()

    def failed(self, fault: Fault) -> None:
        """Nobody waits."""


ALONE = Alone()
