"""Drafts in a step of the engine: requested, filtered by grammars, judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import mlx.core as mx

from ...isolation import Isolation
from ...records import LoadedModel, PrefillChunk, ShowsHidden
from ..execution.decode_batch import NO_DRAFTS, Drafts, Forward
from ..recent import Recent
from ..request import PrefillJob, Row
from ..request_log import Recorder
from ..scheduling.plan import StepPlan
from ..scheduling.scheduler import Scheduler
from .ahead import masks_ahead
from .policy import MOST_DRAFTS
from .speculation import Speculation

Place = tuple[Row, int]
"""A row, and the number of its drafts before a position."""
Isolated = Callable[[Row, str], Isolation]


class DraftStep:
    """Belongs to the engine thread. Without speculation, no row has drafts."""

    def __init__(
        self,
        speculation: Speculation | None,
        scheduler: Scheduler,
        recorder: Recorder,
        recent: Recent,
    ) -> None:
        self._speculation = speculation
        self._scheduler = scheduler
        self._recorder = recorder
        self._recent = recent
        self._forced: dict[Row, int] = {}
        """How many of the drafts of a row its grammar forces: the first ones."""

    @property
    def shows(self) -> ShowsHidden | None:
        """The model, if the drafter needs hidden states."""
        return None if self._speculation is None else self._speculation.shows

    def prefilled(self, model: LoadedModel, job: PrefillJob, chunk: PrefillChunk) -> mx.array:
        """Logits (vocab,) after a chunk. The job keeps the hidden states for the drafter."""
        shown = 0
        if self._speculation is not None:
            shown = chunk.stop - max(chunk.start, self._speculation.first_of(chunk.prompt))
        if shown <= 0 or self.shows is None:
            return model.prefill(chunk)
        logits, hidden = self.shows.prefill_hidden(chunk, shown)
        job.hidden.append(mx.contiguous(hidden))
        return logits

    def begin(self, row: Row, job: PrefillJob) -> None:
        """A row has drawn its first token behind the last states of its prompt, unless it ended."""
        follows = row.finish is None and row.held == len(job.tokens) + 1
        if self._speculation is not None and job.hidden and follows:
            self._speculation.begin(row, job.hidden)

    def wanted(self, plan: StepPlan, *, possible: bool) -> dict[Row, int]:
        """The number of drafts for each row that should have some in this step."""
        if self._speculation is None or not possible:
            return {}
        if plan.chunk is not None and not self._speculation.policy.beside_prompts:
            return {}
        seconds = partial(self._wider, plan)
        wanted = self._speculation.wanted(plan.rows, seconds)
        for row in filter(self._speculation.drafts_for, plan.rows):
            certain = len(_forced_run(row)) - 1  # the first one is drawn already
            if certain > 0 and self._speculation.policy.pays(certain, len(plan.rows), seconds):
                wanted[row] = max(certain, wanted.get(row, 0))
        return wanted

    def guessed(self, wanted: Mapping[Row, int], isolated: Isolated) -> Drafts:
        """Drafts of the rows, as far as their grammars allow them.

        `isolated`: wraps a row's own work. An error in it ends only its request.
        """
        if self._speculation is None or not wanted:
            return NO_DRAFTS
        runs = {row: _forced_run(row) for row in wanted if row.finish is None}
        guessed = self._speculation.propose(wanted)
        guessed |= {row: after_run(run, guessed.get(row, ())) for row, run in runs.items() if run}
        self._forced = {row: len(run) for row, run in runs.items()}
        let_through = {row: _let_through(row, own, isolated) for row, own in guessed.items()}
        return {row: drafts for row, drafts in let_through.items() if drafts}

    def seconds(self, plan: StepPlan, drafts: Drafts) -> float:
        """Expected seconds of a step's pass with these drafts."""
        return self._wider(plan, sum(map(len, drafts.values())))

    def waited(self, seconds: float) -> None:
        """The device idled for this long before a pass with drafts."""
        if self._speculation is not None:
            self._speculation.waited(seconds)

    def passed(self, drafts: int, times: float) -> None:
        """A pass with this many drafts took `times` its expected duration."""
        if drafts and times and self._speculation is not None:
            self._speculation.passed(drafts, times)

    def show(self, forward: Forward) -> None:
        """Give the drafter the hidden states that it needs."""
        if forward.hidden is None or self._speculation is None:
            return
        for at, (row, place) in enumerate(places(forward.rows)):
            if not place:
                end = at + 1 + len(forward.drafts.get(row, ()))
                self._speculation.show(row, forward.hidden[at:end])

    def held(self, row: Row, drafts: int, held: int) -> None:
        """The first `held` of a row's drafts held."""
        if drafts and self._speculation is not None:
            self._speculation.held(row, drafts, held, forced=self._forced.get(row, 0))
            self._recorder.drafts(drafts, held)
            self._recent.drafted += drafts
            self._recent.accepted += held

    def forget(self, rows: Sequence[Row]) -> None:
        """These rows decode no more, or start again."""
        if self._speculation is not None:
            self._speculation.forget(rows)

    def _wider(self, plan: StepPlan, tokens: int) -> float:
        return plan.pass_seconds + self._scheduler.chunking.wider(plan, tokens)


def places(rows: Sequence[Row]) -> Iterator[Place]:
    """The positions of a pass: one for each row and one for each of its drafts."""
    seen: dict[Row, int] = {}
    for row in rows:
        at = seen[row] = seen.get(row, -1) + 1
        yield row, at


def after_run(run: Sequence[int], guess: Sequence[int]) -> Sequence[int]:
    """The forced run, and the rest of a guess that begins with it."""
    return guess if list(guess[: len(run)]) == list(run) else run


def _forced_run(row: Row) -> Sequence[int]:
    """Tokens that the grammar of a row forces behind its last committed token."""
    if row.constraint is None:
        return ()
    left = min(MOST_DRAFTS, row.request.max_tokens - len(row.tokens) - 1)
    with Isolation():  # a grammar that fails reports it with its next mask
        return row.constraint.forced()[: max(0, left)]
    return ()


def _let_through(row: Row, drafts: Sequence[int], isolated: Isolated) -> Sequence[int]:
    if row.constraint is None:
        return drafts
    with isolated(row, "its grammar") as work:
        row.masks = masks_ahead(row.constraint, drafts)
    return () if work.fault is not None else drafts[: len(row.masks) - 1]
