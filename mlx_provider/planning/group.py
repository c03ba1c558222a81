"""A model on a group of machines: what each rank holds, what fits, what a pass exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..families.estimate import DTYPE_BYTES, Footprint, context_that_fits, footprint
from ..families.sharding import BY_HEADS, BY_LAYERS
from .links import Link
from .machines import Machine
from .split import Split
from .subject import Subject
from .weights import Share, shares

TOKEN_BYTES = 4
"""Of a drawn token, which every rank is told."""


@dataclass(frozen=True)
class Rank:
    """A rank and its machine."""

    number: int
    machine: Machine
    share: Share
    need: Footprint
    """Of its weights and its part of a request."""

    @property
    def weights(self) -> int:
        return self.need.weights

    def takes(self, context: int, rows: int) -> int:
        """Bytes with so many requests of so many tokens each, answers included."""
        return self.weights + rows * self.need.row_bytes(context)

    def read_bytes(self, context: int, rows: int) -> float:
        """By a step that draws a token for each of `rows`, its output matrix apart."""
        cached = self.need.per_row + self.need.kv_per_token * context
        return self.share.read_by(rows) + rows * cached

    def fits(self, context: int, rows: int) -> bool:
        return self.takes(context, rows) <= self.machine.room


@dataclass(frozen=True)
class Group:
    """A model over its ranks, of which the first leads."""

    ranks: tuple[Rank, ...]
    split: Split
    hidden: int
    """Values of a hidden state."""
    vocab: int
    value: int
    """Bytes of a value in a hidden state."""

    @property
    def split_by(self) -> str | None:
        """Heads or layers; `None`: there is one rank."""
        if len(self.ranks) == 1:
            return None
        return BY_LAYERS if self.split.layers else BY_HEADS

    @property
    def collectives(self) -> int:
        """Of a pass that draws tokens: all-sums, or what is handed on and gathered; logits where
        the head is split; the tokens."""
        if len(self.ranks) == 1:
            return 0
        return self._states + self.split.gathers_logits + 1

    @property
    def _states(self) -> int:
        """Hidden states of a token that are exchanged in a pass."""
        return self.split.handed + 1 if self.split.layers else self.split.sums

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
        return self._states * self.sum_bytes

    def sent(self, link: Link) -> float:
        """Bytes that a rank sends for a token that is drawn, at most."""
        ranks = len(self.ranks)
        if not self.split.layers:
            return link.sent(ranks, self.token_bytes)
        return ranks * self.sum_bytes + link.sent(ranks, TOKEN_BYTES)

    def fits(self, context: int, rows: int) -> bool:
        return all(rank.fits(context, rows) for rank in self.ranks)

    def longest(self, limit: int | None, rows: int) -> int:
        """Tokens that each of `rows` requests may have on every rank; 0: none fits."""
        return min(context_that_fits(r.need, r.machine.room, limit, rows) for r in self.ranks)


def group(subject: Subject, machines: Sequence[Machine]) -> Group:
    """The model on these machines, a rank each. Raises `BadRequest`, `UnsupportedModel`."""
    count = len(machines)
    own, found = shares(subject.model(), subject.text, count)
    text = subject.text
    return Group(
        tuple(_rank(subject, own[n], found, n, machine) for n, machine in enumerate(machines)),
        found,
        hidden=_number(text.get("hidden_size")),
        vocab=_number(text.get("vocab_size")),
        value=DTYPE_BYTES[subject.dtype],
    )


def _rank(subject: Subject, own: Share, found: Split, number: int, machine: Machine) -> Rank:
    config, dtype, weights = subject.config, subject.dtype, own.weights(number)
    if found.layers:
        held = found.layers[number]
        layers = slice(held.start, held.stop)
        return Rank(number, machine, own, footprint(config, weights, dtype=dtype, layers=layers))
    return Rank(number, machine, own, footprint(config, weights, dtype=dtype, ranks=found.ranks))


def _number(found: object) -> int:
    return found if isinstance(found, int) else 0
