"""Drafts in a step of the engine: requested, filtered by grammars, judged. To the sampler and the
grammar, a row looks as if its drafts were accepted."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import overload

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ...isolation import Fault, Isolation
from ...records import LoadedModel, PrefillChunk, ShowsHidden
from ...records.extensions import MOST_DRAFTS
from ..execution.decode_batch import Drafts, Forward, PassResult
from ..request import PrefillJob, Row, RowConstraint
from ..scheduling.chunking import StepPlan
from ..scheduling.scheduler import Scheduler
from ..step_output import Recent, Recorder
from .costs import Asks, Kind, Seconds
from .speculation import NONE, Speculation

Mask = NDArray[np.uint32]
log = logging.getLogger(__name__)
Place = tuple[Row, int]
"""A row, and the number of its drafts before a position."""
Isolated = Callable[[Row, str], Isolation]


class TokensAhead(Sequence[int]):
    """The tokens of a row, then the first `count` of its drafts. Drafts on the device are read only
    when asked for."""

    def __init__(self, tokens: Sequence[int], drafts: Sequence[int], count: int) -> None:
        self._tokens = tokens
        self._drafts = drafts
        self._count = count

    def __len__(self) -> int:
        return len(self._tokens) + self._count

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        places = range(len(self))[at]
        return [*map(self._at, places)] if isinstance(places, range) else self._at(places)

    def _at(self, place: int) -> int:
        known = len(self._tokens)
        return self._tokens[place] if place < known else self._drafts[place - known]


def ahead(row: Row, drafts: Sequence[int], count: int) -> Row:
    """For one draw. `row` does not change."""
    if not count:
        return row
    twin = copy.copy(row)
    twin.tokens = TokensAhead(row.tokens, drafts, count)  # type: ignore[assignment]
    twin.history = copy.copy(row.history)
    return twin


def masks_ahead(constraint: RowConstraint, drafts: Sequence[int]) -> list[Mask | None]:
    """Masks before each draft and after the last one, up to the first draft that the grammar
    rejects. Raises the errors of the constraint."""
    masks = [constraint.mask()]
    later = constraint.fork() if drafts else None
    for token in drafts:
        if later is None or not allows(masks[-1], token):
            break
        later.advance(token)
        if later.finished:
            break
        masks.append(later.mask())
    return masks


def allows(mask: Mask | None, token: int) -> bool:
    return mask is None or bool(mask[token // 32] >> np.uint32(token % 32) & 1)


@dataclass(frozen=True)
class Wanted:
    asked: Mapping[Row, Asks] = field(default_factory=dict)
    known: bool = False
    """Whether tokens are read first for drafts of predicted text."""

    def __bool__(self) -> bool:
        return bool(self.asked) or self.known


@dataclass
class Origin:
    known: int = 0
    """Number of leading drafts from its grammar or its forecast."""
    source: int | None = None
    """The drafter of the others."""
    refused: bool = False
    """The grammar has refused the draft after the last one, which counts as rejected."""
    kind: Kind = NONE


class DraftStep:
    """Engine thread only. Without speculation, no row has drafts."""

    def __init__(
        self,
        speculation: Speculation | None,
        scheduler: Scheduler,
        recorder: Recorder,
        recent: Recent,
    ) -> None:
        self._speculation = speculation or Speculation(vocab=0)
        self._scheduler = scheduler
        self._recorder = recorder
        self._recent = recent
        self._origins: dict[Row, Origin] = {}
        """Origins of the drafts in the last pass."""
        self._possible = True
        """Whether passes of the batch can check drafts."""

    @property
    def shows(self) -> ShowsHidden | None:
        return self._speculation.shows

    def prefilled(self, model: LoadedModel, job: PrefillJob, chunk: PrefillChunk) -> mx.array:
        """Logits (vocab,) after a chunk. The job keeps the hidden states for the drafter."""
        shown = chunk.stop - max(chunk.start, self._speculation.first_of(chunk.prompt))
        if shown <= 0 or self.shows is None:
            return model.prefill(chunk)
        logits, hidden = self.shows.prefill_hidden(chunk, shown)
        job.hidden.append(mx.contiguous(hidden))
        return logits

    def begin(self, row: Row, job: PrefillJob) -> None:
        follows = row.finish is None and row.held == len(job.tokens) + 1
        if job.hidden and follows:
            self._speculation.begin(row, job.hidden)

    def allowed(self, plan: StepPlan, *, possible: bool) -> bool:
        self._possible = possible
        if not (self._speculation.sources and plan.rows and possible):
            return False
        return plan.chunk is None or self._speculation.policy.beside_prompts

    def wanted(self, plan: StepPlan) -> Wanted:
        seconds, count = self._seconds(plan), len(plan.rows)
        asked = self._speculation.wanted(plan.rows, seconds)
        # the first token of a run is drawn already
        known = any(self._worthwhile(row, count, seconds, drawn=1) for row in plan.rows)
        first = known or any(self._reads_first(row, count, seconds) for row in plan.rows)
        return Wanted(asked, known=first)

    def guessed(self, plan: StepPlan, asked: Mapping[Row, Asks], isolated: Isolated) -> Drafts:
        """Drafts as far as the rows' grammars allow them, once all tokens are read. `isolated`:
        wraps a row's own work, so that an error in it ends only its request."""
        seconds, count = self._seconds(plan), len(plan.rows)
        left = [row for row in plan.rows if row.finish is None]
        known = {row: self._worthwhile(row, count, seconds) for row in left}
        guesses = self._speculation.propose(asked)
        guessed = {row: own.tokens for row, own in guesses.items()}
        sources = {row: own.source for row, own in guesses.items()}
        guessed |= {row: after_run(run, guessed.get(row, ())) for row, run in known.items() if run}
        let_through = {row: _let_through(row, own, isolated) for row, own in guessed.items()}
        drafts = {row: own for row, own in let_through.items() if own}
        refused = {row for row, own in guessed.items() if len(let_through[row]) < len(own)}
        self._origins = {
            row: Origin(len(known.get(row, ())), sources.get(row), row in refused) for row in drafts
        }
        for row in refused - drafts.keys() & guesses.keys():
            self._speculation.refused(row, sources[row])
        return drafts

    def follow(self, row: Row, token: int) -> None:
        """The forecast of a row sees its next token. An error in it costs only the forecast."""
        if row.forecast is None or not (self._possible and self._speculation.sources):
            return
        with Isolation(partial(_no_more_forecasts, row)):
            predicted, followed = row.forecast.likely(), row.forecast.follows
            row.forecast.advance(token)
            own, known = self._speculation.rows.get(row), self._speculation.policy.known_text
            if own is not None and predicted:
                known.learn_forecast(own.foretold, right=predicted[0] == token)
            elif own is not None and followed:
                known.learn_beginning(own.begins, begun=bool(row.forecast.likely()))

    def _worthwhile(
        self, row: Row, rows: int, seconds: Seconds, *, drawn: int = 0
    ) -> Sequence[int]:
        """Predicted text of a row that pays in a pass of `rows`. `drawn`: number of its leading
        tokens that are no drafts any more."""
        if row.constraint is None and row.forecast is None:
            return ()
        if not self._speculation.drafts_for(row):
            return ()
        run, certain = _known_run(row)
        if len(run) <= drawn:
            return ()
        known = self._speculation.policy.known_text
        chance = known.foresees(self._speculation.rows[row].foretold)
        chances = [1.0 if at < certain else chance for at in range(drawn, len(run))]
        worth = known.worthwhile(chances, rows, seconds)
        return run[drawn : drawn + worth]

    def _reads_first(self, row: Row, rows: int, seconds: Seconds) -> bool:
        """Whether the last token of a row should be read before the pass, because predicted text
        may begin after it."""
        if row.forecast is None:
            return False
        with Isolation(partial(_no_more_forecasts, row)):
            if not row.forecast.follows or row.forecast.likely():
                return False
            if self._speculation.drafts_for(row):
                own, known = self._speculation.rows[row], self._speculation.policy.known_text
                return known.reads_first(own.begins, rows, seconds)
        return False

    def seconds(self, plan: StepPlan, drafts: Drafts) -> float:
        if not drafts:
            return plan.pass_seconds
        return self._seconds(plan)(sum(map(len, drafts.values())))

    def waited(self, drafts: Drafts, seconds: float) -> None:
        origins = [self._origins[row] for row in drafts]
        known = any(origin.known for origin in origins)
        kind = self._speculation.waited(seconds, known=known)
        for origin in origins:
            origin.kind = kind

    def passed(self, results: Sequence[PassResult], times: float) -> None:
        """A pass took `times` its expected duration. `results`: of its rows."""
        drafts = sum(each.drafts for each in results)
        kinds = [
            self._origins[each.row].kind
            for each in results
            if each.drafts and each.row in self._origins
        ]
        if kinds and times:
            self._speculation.policy.costs[kinds[0]].passed(drafts, times)

    def show(self, forward: Forward) -> None:
        if forward.hidden is None:
            return
        for at, (row, place) in enumerate(places(forward.rows)):
            if not place:
                end = at + 1 + len(forward.drafts.get(row, ()))
                self._speculation.show(row, forward.hidden[at:end])

    def held(self, row: Row, drafts: int, held: int) -> None:
        if drafts:
            origin = self._origins.pop(row, Origin())
            self._speculation.held(
                row, drafts, held, known=origin.known, source=origin.source, refused=origin.refused
            )
            self._recorder.drafts(drafts, held)
            self._recent.drafted += drafts
            self._recent.accepted += held

    def forget(self, rows: Sequence[Row]) -> None:
        self._speculation.forget(rows)
        for row in rows:
            self._origins.pop(row, None)

    def _seconds(self, plan: StepPlan) -> Seconds:
        longer = self._scheduler.chunking.wider(plan)
        return lambda tokens: plan.pass_seconds + longer(tokens)


def places(rows: Sequence[Row]) -> Iterator[Place]:
    """One position for each row and one for each of its drafts."""
    seen: dict[Row, int] = {}
    for row in rows:
        at = seen[row] = seen.get(row, -1) + 1
        yield row, at


def after_run(run: Sequence[int], guess: Sequence[int]) -> Sequence[int]:
    """The forced run, and the rest of a guess that begins with it."""
    return guess if list(guess[: len(run)]) == list(run) else run


def _known_run(row: Row) -> tuple[Sequence[int], int]:
    """Tokens after the last committed one: those that the grammar forces, then those that the
    forecast predicts; and the number of the former."""
    left = max(0, min(MOST_DRAFTS + 1, row.request.max_tokens - len(row.tokens) - 1))
    forced: Sequence[int] = ()
    if row.constraint is not None:
        with Isolation():  # a grammar that fails reports it with its next mask
            forced = row.constraint.forced()[:left]
    foretold: Sequence[int] = ()
    if row.forecast is not None:
        with Isolation(partial(_no_more_forecasts, row)):
            foretold = row.forecast.likely()[:left]
    return after_run(forced, foretold), len(forced)


def _no_more_forecasts(row: Row, fault: Fault) -> None:
    log.error("request %s: its forecast failed\n%s", row.request.id, fault.trace)
    row.forecast = None


def _let_through(row: Row, drafts: Sequence[int], isolated: Isolated) -> Sequence[int]:
    if row.constraint is None:
        return drafts
    with isolated(row, "its grammar") as work:
        row.masks = masks_ahead(row.constraint, drafts)
    return () if work.fault is not None else drafts[: len(row.masks) - 1]
