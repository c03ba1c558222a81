"""Drafts of the rows of one engine: requests to the drafters, and results."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

import mlx.core as mx

from ...isolation import Isolation
from ...records import (
    DeviceTokens,
    Drafter,
    Drafting,
    DraftRow,
    LoadedModel,
    Prompt,
    ShowsHidden,
)
from ..execution.batching import CircuitBreaker
from ..request import Row
from .costs import KNOWN_TEXT, Ask, Asks, Kind, within
from .policy import AcceptanceRate, Policy, RowAcceptance

log = logging.getLogger(__name__)

KEPT = 64
"""States per row kept for a drafter until it is asked again, and last states of a prompt."""
NONE: Kind = frozenset()
UNASKED = 4096
"""States of prompts kept for all rows until the drafter is asked about them. One row always has its
own."""


@dataclass(frozen=True)
class Source:
    drafting: Drafting
    shows: ShowsHidden | None = None
    """The model, if the drafter needs its hidden states. At most one drafter of an engine may."""
    media: bool = True


@dataclass
class DrafterRow:
    odds: RowAcceptance = field(default_factory=RowAcceptance)
    seen: DraftRow | None = None


@dataclass
class DraftedRow:
    own: Sequence[DrafterRow]
    foretold: AcceptanceRate = field(default_factory=AcceptanceRate)
    """Acceptance of its predicted tokens."""
    begins: AcceptanceRate = field(default_factory=AcceptanceRate)
    """How often predicted text began after a token that was not predicted."""
    shown: list[mx.array] = field(default_factory=list)
    """Hidden states, (n, hidden), that the drafter has not received yet."""
    drawn_from: mx.array | None = None
    """States of its last pass with drafts, until the result is known or the drafter has them."""


@dataclass(frozen=True)
class Guess:
    tokens: Sequence[int]
    source: int


class Speculation:
    """Engine thread only."""

    def __init__(
        self,
        *sources: Source,
        vocab: int,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`sources`: the drafters, the best first."""
        self._vocab = vocab
        self.sources = sources
        hidden = [source for source in sources if source.shows is not None]
        self.shows = hidden[0].shows if hidden else None
        self.policy = policy or Policy()
        self.clock = clock
        self.rows: dict[Row, DraftedRow] = {}
        self._asked: set[int] = set()
        self._guessing = 0.0, 0
        """Seconds of the last drafting, and its rounds. 0 rounds: it included preparation."""
        self._breakers = [CircuitBreaker() for _ in self.sources]

    def wanted(self, rows: Sequence[Row], seconds: Callable[[int], float]) -> dict[Row, Asks]:
        """`seconds`: duration of a pass by the number of its extra tokens."""
        opened = [breaker for breaker in self._breakers if not breaker.closed]
        for breaker in opened:
            breaker.passed(used=False)
        if len(opened) == len(self._breakers):
            return {}
        able = {row: own for row in rows if any(own := self._able(row))}
        counts = self.policy.wanted([*able.values()], len(rows) - len(able), seconds)
        self.policy.rested([*able.values()])
        found = {
            row: within(asks, row.request.max_tokens - len(row.tokens) - 1)
            for row, asks in zip(able, counts, strict=True)
        }
        return {row: asks for row, asks in found.items() if asks}

    def propose(self, wanted: Mapping[Row, Asks]) -> dict[Row, Guess]:
        """Guesses of the drafters. Rows without a guess are left out. Never raises."""
        self._guessing, self._asked = (0.0, 0), set()
        if not wanted:
            return {}
        began = self.clock()
        left = {row: asks for row, asks in wanted.items() if row.finish is None}
        guesses: dict[Row, Guess] = {}
        all_ready = True
        while left:
            # the last drafters come first: they need no device, and the rows that they leave are
            # asked for together
            source = max(asks[0].source for asks in left.values())
            asked = {row: asks[0] for row, asks in left.items() if asks[0].source == source}
            found = self._guesses(source, asked)
            all_ready = all_ready and found.keys() == asked.keys()
            guesses |= {row: Guess(own, source) for row, own in found.items() if own}
            rest = {row: asks[1:] if row in asked else asks for row, asks in left.items()}
            left = {row: asks for row, asks in rest.items() if asks and row not in guesses}
        rounds = max((len(each.tokens) for each in guesses.values()), default=0)
        self._guessing = self.clock() - began, rounds if all_ready else 0
        return guesses

    def _guesses(self, source: int, asked: Mapping[Row, Ask]) -> dict[Row, Sequence[int]]:
        """The guesses of one drafter for rows for which it is ready. A guess may be empty."""
        self._asked.add(source)
        views = [self._view(row, ask) for row, ask in asked.items()]
        with Isolation() as tried:
            guesses = self.sources[source].drafting.propose(views)
            drafts = {
                row: self._checked(own, ask.drafts)
                for (row, ask), own in zip(asked.items(), guesses, strict=True)
                if own is not None
            }
        if tried.fault is not None:
            log.error("the drafter failed; rows continue without drafts\n%s", tried.fault.trace)
            self._breakers[source].failed()
            self._drop(source)
            return {}
        for each in views:
            each.hidden = None
        self._breakers[source].passed(used=True)
        for row, own in drafts.items():
            if not own:
                self.policy.learn(source, self.rows[row].own[source].odds, 0, 0)
        return drafts

    def _drop(self, source: int) -> None:
        for row in self.rows.values():
            row.own[source].seen = None
            if self.sources[source].shows is not None:
                row.shown, row.drawn_from = [], None

    def waited(self, seconds: float, *, known: bool) -> Kind:
        """The device idled for this long before a pass with drafts. `known`: it has drafts of
        predicted text. Returns the kind of the pass."""
        guessing, rounds = self._guessing
        kind = KNOWN_TEXT.union(self._asked) if known else frozenset(self._asked)
        idle = max(0.0, seconds - guessing)
        self.policy.costs[kind].timed(idle, guessing, rounds)
        if known and self._asked:
            self.policy.costs[KNOWN_TEXT].timed(idle, 0.0, 0)
        return kind

    def first_of(self, prompt: Prompt) -> int:
        """Number of prompt tokens after which the drafter gets hidden states: the final text."""
        media = max((span.end for span in prompt.spans), default=0)
        if self.shows is None:
            return len(prompt.tokens)
        return max(media, len(prompt.tokens) - KEPT)

    def begin(self, row: Row, hidden: Sequence[mx.array]) -> None:
        if not _may(row):
            return
        before = sum(each.shape[0] for own in self.rows.values() for each in own.shown)
        more = not before or before + sum(each.shape[0] for each in hidden) <= UNASKED
        self.rows[row] = self._new(list(hidden) if more else [hidden[-1][-1:]])

    def show(self, row: Row, hidden: mx.array) -> None:
        """Add the states (1 + drafts, hidden) from which a row's next tokens are drawn."""
        own = self.rows.get(row)
        if own is None:
            return
        if hidden.shape[0] > 1:
            own.drawn_from = hidden
        else:
            _keep(own, hidden)

    def held(
        self,
        row: Row,
        drafts: int,
        held: int,
        *,
        known: int = 0,
        source: int | None = 0,
        refused: bool = False,
    ) -> None:
        """The first `held` of a row's drafts were accepted. `known`: number of leading drafts from
        its grammar or forecast; `source`: the drafter of the others, if any; `refused`: the
        grammar refused its next draft."""
        row.request.drafted += drafts
        row.request.accepted += held
        own = self.rows.get(row)
        if own is None:
            return
        guessed = drafts - known + refused
        if source is not None and guessed > 0 and held >= known:
            self.policy.learn(source, own.own[source].odds, guessed, held - known)
        if own.drawn_from is not None:
            _keep(own, own.drawn_from[: held + 1])
            own.drawn_from = None

    def refused(self, row: Row, source: int) -> None:
        if row in self.rows:
            self.policy.learn(source, self.rows[row].own[source].odds, 1, 0)

    def forget(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.rows.pop(row, None)

    def drafts_for(self, row: Row) -> bool:
        closed = any(breaker.closed for breaker in self._breakers)
        return closed and row in self.rows and _may(row)

    def _new(self, hidden: list[mx.array]) -> DraftedRow:
        return DraftedRow([DrafterRow() for _ in self.sources], shown=hidden)

    def _able(self, row: Row) -> list[RowAcceptance | None]:
        if not _may(row):
            return []
        if row not in self.rows:
            self.rows[row] = self._new([])
        followed = self.rows[row]
        shown = bool(followed.shown) or followed.drawn_from is not None
        return [
            own.odds
            if breaker.closed
            and (source.media or not row.request.prompt.spans)
            and (source.shows is None or shown)
            else None
            for own, source, breaker in zip(followed.own, self.sources, self._breakers, strict=True)
        ]

    def _checked(self, guesses: Sequence[int], count: int) -> Sequence[int]:
        """At most `count` guesses, up to the first invalid token. Those on the device are not read;
        the pass replaces invalid ones, and these are not accepted."""
        if isinstance(guesses, DeviceTokens):
            return guesses.first(count)
        return list(takewhile(range(self._vocab).__contains__, map(int, islice(guesses, count))))

    def _view(self, row: Row, ask: Ask) -> DraftRow:
        followed = self.rows[row]
        own = followed.own[ask.source]
        if own.seen is None:
            own.seen = DraftRow(row.all_tokens, salt=row.request.salt)
        seen = own.seen
        seen.tokens.extend(row.tokens[len(seen.tokens) - len(row.request.prompt.tokens) :])
        seen.wanted = ask.drafts
        if self.sources[ask.source].shows is not None:
            seen.hidden = mx.concatenate(followed.shown) if followed.shown else None
            seen.fresh = 0 if seen.hidden is None else seen.hidden.shape[0]
            followed.shown, followed.drawn_from = [], None
        return seen


def source_of(drafter: Drafter, drafting: Drafting, model: LoadedModel) -> Source:
    shows = model if drafter.hidden and isinstance(model, ShowsHidden) else None
    return Source(drafting, shows, drafter.media)


def speculation_of(
    sources: Sequence[Source], model: LoadedModel, *, policy: Policy | None = None
) -> Speculation:
    """`sources`: the best first. At most one needs hidden states."""
    ordered = sorted(sources, key=lambda each: each.shows is None)
    return Speculation(*ordered, vocab=model.info.vocab_size, policy=policy)


def _keep(own: DraftedRow, hidden: mx.array) -> None:
    if len(own.shown) >= KEPT:
        own.shown = []
    own.shown.append(hidden)


def _may(row: Row) -> bool:
    return row.request.drafts and row.finish is None and bool(row.tokens)
