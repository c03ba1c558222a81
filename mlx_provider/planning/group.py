"""A model on a group of machines: what each rank holds, what fits, what a pass exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..families.estimate import DTYPE_BYTES, Footprint, context_that_fits, footprint
from .machines import Machine
from .split import Split
from .subject import Subject
from .weights import Share, share

TOKEN_BYTES = 4
"""Of a drawn token, which every rank is told."""


@dataclass(frozen=True)
class Rank:
    """A rank and its machine."""

    number: int
    machine: Machine
    weights: int
    need: Footprint
    """Of its weights and its part of a request."""

    def takes(self, context: int, rows: int) -> int:
        """Bytes with so many requests of so many tokens each, answers included."""
        return self.weights + rows * self.need.row_bytes(context)

    def fits(self, context: int, rows: int) -> bool:
        return self.takes(context, rows) <= self.machine.room


@dataclass(frozen=True)
class Group:
    """A model over its ranks, of which the first leads."""

    ranks: tuple[Rank, ...]
    share: Share
    split: Split
    hidden: int
    """Values of a hidden state."""
    vocab: int
    value: int
    """Bytes of a value in a hidden state."""

    @property
    def collectives(self) -> int:
        """Of a pass that draws tokens: all-sums, logits where the head is split, the tokens."""
        alone = len(self.ranks) == 1
        return 0 if alone else self.split.sums + self.split.gathers_logits + 1

    @property
    def sum_bytes(self) -> int:
        """Of one token in one all-sum."""
        return self.hidden * self.value

    @property
    def token_bytes(self) -> int:
        """Of all collectives for a token that is drawn."""
        logits = self.vocab * self.value if self.split.gathers_logits else 0
        drawn = 0 if len(self.ranks) == 1 else TOKEN_BYTES
        return self.prompt_token_bytes + logits + drawn

    @property
    def prompt_token_bytes(self) -> int:
        """Of all collectives for a token of a prompt."""
        return self.split.sums * self.sum_bytes

    def fits(self, context: int, rows: int) -> bool:
        return all(rank.fits(context, rows) for rank in self.ranks)

    def longest(self, limit: int | None, rows: int) -> int:
        """Tokens that each of `rows` requests may have on every rank; 0: none fits."""
        return min(context_that_fits(r.need, r.machine.room, limit, rows) for r in self.ranks)


def group(subject: Subject, machines: Sequence[Machine]) -> Group:
    """The model on these machines, a rank each. Raises `BadRequest`, `UnsupportedModel`."""
    count = len(machines)
    own, found = share(subject.model(), subject.text, count)
    text = subject.text
    return Group(
        tuple(_rank(subject, own, number, count, m) for number, m in enumerate(machines)),
        own,
        found,
        hidden=_number(text.get("hidden_size")),
        vocab=_number(text.get("vocab_size")),
        value=DTYPE_BYTES[subject.dtype],
    )


def _rank(subject: Subject, own: Share, number: int, ranks: int, machine: Machine) -> Rank:
    weights = own.weights(number)
    need = footprint(subject.config, weights, dtype=subject.dtype, ranks=ranks)
    return Rank(number, machine, weights, need)


def _number(found: object) -> int:
    return found if isinstance(found, int) else 0
