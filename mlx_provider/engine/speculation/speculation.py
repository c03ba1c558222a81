"""Drafts of the rows of one engine: requests to the drafter, and results."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

import mlx.core as mx

from ...errors import BadRequest
from ...isolation import Isolation
from ...records import (
    DeviceTokens,
    Drafter,
    Drafting,
    DraftRow,
    DraftsAhead,
    LoadedModel,
    Prompt,
    ShowsHidden,
    ShowsLayers,
    Unread,
)
from ..execution.batch_layout import NO_RESULTS, Results
from ..execution.circuit_breaker import CircuitBreaker
from ..request import Row
from .policy import Odds, Policy, RowOdds

log = logging.getLogger(__name__)

KEPT = 64
"""States per row that are kept for a drafter that is not asked, so that it can continue later."""
UNASKED = 4096
"""States of prompts that are kept for all rows until the drafter is asked about them. One row
always has its own."""


@dataclass
class Followed:
    """A row that may have drafts."""

    odds: RowOdds = field(default_factory=RowOdds)
    foretold: Odds = field(default_factory=Odds)
    """Results of its forecast."""
    begins: Odds = field(default_factory=Odds)
    """How often its forecast had something to foretell behind a token that it had not."""
    seen: DraftRow | None = None
    """The drafter's view of the row, from its first drafts on."""
    shown: list[mx.array] = field(default_factory=list)
    """Hidden states, (n, hidden), that the drafter has not received yet."""
    drawn_from: mx.array | None = None
    """States of its last pass with drafts, until the result is known, or given to the drafter."""
    unread: Unread | None = None
    """The result that its last guesses follow, until it is read."""


class Speculation:
    """Belongs to the engine thread."""

    def __init__(
        self,
        drafting: Drafting,
        *,
        vocab: int,
        shows: ShowsHidden | None = None,
        context: int = KEPT,
        media: bool = True,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`vocab`: size of the model's vocabulary; `shows`: what shows the hidden states that the
        drafter needs; `context`, `media`: see `Drafter`."""
        self._vocab = vocab
        self.shows = shows
        self._context = context
        self.policy = policy or Policy()
        self.drafting = drafting
        self._media = media
        self.clock = clock
        self._rows: dict[Row, Followed] = {}
        self._guessing = 0.0, 0
        """Seconds of the last drafting, and its rounds. 0 rounds: there was additional
        preparation."""
        self._breaker = CircuitBreaker()
        """For the drafter."""

    def wanted(self, rows: Sequence[Row], seconds: Callable[[int], float]) -> dict[Row, int]:
        """The number of drafts for each row that may and should have some.

        seconds: duration of a pass by the number of its extra tokens.
        """
        if not self._breaker.closed:
            self._breaker.passed(used=False)
            return {}
        followed = [row for row in rows if self._may(row)]
        for row in followed:
            self._rows.setdefault(row, Followed())
        able = [row for row in followed if self._knows(row)]
        known = [self._rows[row].odds for row in able]
        counts = self.policy.wanted(known, len(rows) - len(able), seconds)
        self.policy.rested(known)
        left = [row.request.max_tokens - len(row.tokens) - 1 for row in able]
        found = zip(able, counts, left, strict=True)
        return {row: min(count, most) for row, count, most in found if min(count, most) > 0}

    @property
    def drafts_ahead(self) -> bool:
        """Whether the drafter can guess before the last pass is read."""
        return isinstance(self.drafting, DraftsAhead) and self.drafting.drafts_ahead

    def propose(
        self, wanted: Mapping[Row, int], unread: Results = NO_RESULTS
    ) -> dict[Row, Sequence[int]]:
        """The drafter's guesses. Rows without a guess are left out. Never raises.

        `unread`: results of the last pass that guesses follow, if it `drafts_ahead`.
        """
        self._guessing = 0.0, 0
        if not wanted:
            return {}
        began = self.clock()
        rows = [row for row in wanted if row.finish is None]
        asked = [self._asked(row, wanted[row], unread.get(row)) for row in rows]
        with Isolation() as tried:
            guesses = self.drafting.propose(asked)
            drafts = {
                row: self._checked(own, wanted[row])
                for row, own in zip(rows, guesses, strict=True)
                if own is not None
            }
        if tried.fault is not None:
            log.error("the drafter failed; rows continue without drafts\n%s", tried.fault.trace)
            self._breaker.failed()
            self._rows.clear()
            return {}
        for each in asked:
            each.hidden = each.unread = None
        self._breaker.passed(used=True)
        for row, own in drafts.items():
            if not own:
                self.policy.learn(self._rows[row].odds, 0, 0)
        all_ready = len(drafts) == len(rows)
        rounds = max(map(len, drafts.values()), default=0) if all_ready else 0
        self._guessing = self.clock() - began, rounds
        return {row: own for row, own in drafts.items() if own}

    def waited(self, seconds: float | None) -> None:
        """The device idled for this long before a pass with drafts. `None`: it had another pass to
        run."""
        guessing, rounds = self._guessing
        if seconds is None:
            self.policy.timed(0.0, 0.0, rounds)
        else:
            self.policy.timed(max(0.0, seconds - guessing), guessing, rounds)

    def passed(self, drafts: int, times: float) -> None:
        """A pass with this many drafts took `times` its expected duration."""
        self.policy.passed(drafts, times)

    def first_of(self, prompt: Prompt) -> int:
        """Number of prompt tokens after which the drafter gets hidden states: the text at its
        end."""
        media = max((span.end for span in prompt.spans), default=0)
        if self.shows is None:
            return len(prompt.tokens)
        return max(media, len(prompt.tokens) - self._context)

    def begin(self, row: Row, hidden: Sequence[mx.array]) -> None:
        """A row has drawn its first token. `hidden`: states of its prompt, each (n, hidden)."""
        if not self._may(row):
            return
        before = sum(_count(own.shown) for own in self._rows.values())
        more = not before or before + _count(hidden) <= UNASKED
        self._rows[row] = Followed(shown=list(hidden) if more else [hidden[-1][-1:]])

    def show(self, row: Row, hidden: mx.array) -> None:
        """Add the states (1 + drafts, hidden) from which a row's next tokens are drawn."""
        own = self._rows.get(row)
        if own is None:
            return
        if hidden.shape[0] > 1:
            own.drawn_from = hidden
        else:
            _keep(own, hidden)

    def held(self, row: Row, drafts: int, held: int, *, known: int = 0) -> None:
        """The first `held` of a row's drafts held. `known`: so many, the first ones, come from its
        grammar or its forecast, so that they show nothing about the drafter."""
        row.request.drafted += drafts
        row.request.accepted += held
        own = self._rows.get(row)
        if own is None:
            return
        if own.unread is not None:
            own.unread.read, own.unread = held, None
        if drafts > known and held >= known:
            self.policy.learn(own.odds, drafts - known, held - known)
        if own.drawn_from is not None:
            _keep(own, own.drawn_from[: held + 1])
            own.drawn_from = None

    def forget(self, rows: Sequence[Row]) -> None:
        """These rows decode no more, or start again."""
        for row in rows:
            self._rows.pop(row, None)

    def chance(self, row: Row) -> float:
        """Of a token that the row's forecast foretells."""
        return self.policy.foresees(self._rows[row].foretold)

    def foretold(self, row: Row, *, right: bool) -> None:
        """The row's forecast has foretold its next token."""
        if row in self._rows:
            self.policy.learn_forecast(self._rows[row].foretold, right=right)

    def reads_first(self, row: Row, rows: int, seconds: Callable[[int], float]) -> bool:
        """See `Policy`."""
        return self.policy.reads_first(self._rows[row].begins, rows, seconds)

    def begun(self, row: Row, *, begun: bool) -> None:
        """The row's forecast had not foretold the last token. `begun`: it foretells the next."""
        if row in self._rows:
            self.policy.learn_beginning(self._rows[row].begins, begun=begun)

    def drafts_for(self, row: Row) -> bool:
        """Whether a row may have drafts that are not the drafter's."""
        return self._breaker.closed and row in self._rows and self._may(row)

    def _may(self, row: Row) -> bool:
        request = row.request
        if not request.drafts or row.finish is not None or not row.tokens:
            return False
        return self._media or not request.prompt.spans

    def _checked(self, guesses: Sequence[int], count: int) -> Sequence[int]:
        """At most `count` guesses, up to the first invalid token. Those on the device are not
        read; the pass replaces invalid ones, and these are not accepted."""
        if isinstance(guesses, DeviceTokens):
            return guesses.first(count)
        return list(takewhile(self._known, map(int, islice(guesses, count))))

    def _known(self, token: int) -> bool:
        return 0 <= token < self._vocab

    def _knows(self, row: Row) -> bool:
        """Whether the drafter has its inputs for the row, or will have them after tokens are
        read."""
        own = self._rows[row]
        return self.shows is None or bool(own.shown) or own.drawn_from is not None

    def _asked(self, row: Row, count: int, unread: Unread | None) -> DraftRow:
        own = self._rows[row]
        if own.seen is None:
            own.seen = DraftRow(row.all_tokens, salt=row.request.salt)
        seen = own.seen
        seen.tokens.extend(row.tokens[len(seen.tokens) - len(row.request.prompt.tokens) :])
        seen.wanted, seen.unread = count, unread
        shown = own.shown
        if unread is not None and own.drawn_from is not None:
            shown = [*shown, own.drawn_from]
        seen.hidden = mx.concatenate(shown) if shown else None
        more = 0 if unread is None else unread.tokens.size
        seen.fresh = 0 if seen.hidden is None else seen.hidden.shape[0] - more
        own.shown, own.drawn_from, own.unread = [], None, unread
        return seen


def speculation_of(
    drafter: Drafter, drafting: Drafting, model: LoadedModel, *, policy: Policy | None = None
) -> Speculation:
    """The speculation of a started drafter. Raises `BadRequest` if the model does not show the
    states that the drafter needs."""
    return Speculation(
        drafting,
        vocab=model.info.vocab_size,
        shows=_shows(drafter, drafting, model),
        context=drafter.context,
        media=drafter.media,
        policy=policy,
    )


def _shows(drafter: Drafter, drafting: Drafting, model: LoadedModel) -> ShowsHidden | None:
    layers = drafter.layers(drafting)
    if not layers:
        return model if drafter.hidden and isinstance(model, ShowsHidden) else None
    if isinstance(model, ShowsLayers):
        return model.showing(layers)
    raise BadRequest("the model does not show the outputs of its layers", param="drafter")


def _count(hidden: Sequence[mx.array]) -> int:
    return sum(each.shape[0] for each in hidden)


def _keep(own: Followed, hidden: mx.array) -> None:
    if len(own.shown) >= KEPT:
        own.shown = []
    own.shown.append(hidden)
