"""The drafts of an engine's rows: who is asked for them, and how many of them the model accepts."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

import mlx.core as mx

from ...isolation import CircuitBreaker, Fault, attempt
from ...records import (
    DeviceTokens,
    Drafter,
    Drafting,
    DraftRow,
    HiddenStatesModel,
    LoadedModel,
    PrefillChunk,
)
from ..execution.decode_batch import Drafts, Forward
from ..request import PrefillJob, Row
from ..scheduling.step import StepPlan
from .drafted_tokens import after_run, known_run, let_through, places, predict
from .policy import KNOWN_TEXT, AcceptanceRate, Ask, Asks, Kind, Policy, RowAcceptance, Seconds

log = logging.getLogger(__name__)

KEPT = 64  # most states of a prompt's end, and most arrays of states of a row, kept for a drafter
UNASKED = 4096  # most hidden states of prompts that several rows together keep for a drafter


@dataclass(frozen=True)
class Source:
    drafting: Drafting  # the drafter at work
    hidden_model: HiddenStatesModel | None = None
    """The model, if the drafter needs its hidden states. At most one drafter of an engine may."""
    media: bool = True  # whether it drafts for prompts with media, too


@dataclass
class Origin:
    """Who made the drafts of a row in the last pass."""

    known: int = 0  # number of leading drafts from its grammar or its text predictor
    source: int | None = None  # the drafter of the others, as an index
    refused: bool = False  # whether the grammar has refused the draft after the last one


@dataclass
class DraftedRow:
    rates: Sequence[RowAcceptance]  # by drafter
    seen: list[DraftRow | None]
    """What each drafter sees of the row. `None`: it was not asked, or has failed."""
    predicted: AcceptanceRate = field(default_factory=AcceptanceRate)  # of its predicted text
    hidden: list[mx.array] = field(default_factory=list)
    """Hidden states, each (n, hidden), that the drafter has not received yet."""
    drawn_from: mx.array | None = None
    """States of its last pass with drafts, until the result is known or the drafter has them."""
    origin: Origin = field(default_factory=Origin)

    def add_hidden(self, hidden: mx.array) -> None:
        if len(self.hidden) >= KEPT:
            self.hidden = []
        self.hidden.append(hidden)


class Speculation:
    """Makes the drafts of each step. Engine thread only. Without drafters, no row has drafts."""

    def __init__(
        self,
        *sources: Source,
        vocab: int,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`sources`: the best first. One that needs hidden states is moved before all others."""
        self._vocab = vocab
        self.sources = sorted(sources, key=lambda source: source.hidden_model is None)
        self.hidden_model = next((source.hidden_model for source in self.sources), None)
        self.policy = policy or Policy()
        self.clock = clock
        self.rows: dict[Row, DraftedRow] = {}
        self._asked: set[int] = set()
        self._kind: Kind = frozenset()  # the drafters of the last pass with drafts
        self._last_drafting = 0.0, 0
        """Seconds for the last guesses, and tokens of the longest. 0 tokens: no typical time,
        because there was no guess, or a drafter was not ready."""
        self._breakers = [CircuitBreaker() for _ in self.sources]

    def prefill(self, model: LoadedModel, job: PrefillJob, chunk: PrefillChunk) -> mx.array:
        """Run a chunk of a prompt. Returns logits (vocab,) after it. The job keeps hidden states of
        the prompt's last text for the drafter."""
        if self.hidden_model is None:
            return model.prefill(chunk)
        media = max((span.end for span in chunk.prompt.spans), default=0)
        states = chunk.stop - max(chunk.start, media, len(chunk.prompt.tokens) - KEPT)
        if states <= 0:
            return model.prefill(chunk)
        logits, hidden = self.hidden_model.prefill_hidden(chunk, states)
        job.hidden.append(mx.contiguous(hidden))
        return logits

    def begin(self, row: Row, job: PrefillJob) -> None:
        """Keep the hidden states of a prompt for a row that begins to decode."""
        hidden = list(job.hidden)
        if not hidden or row.length_to_cache != len(job.tokens) + 1 or not can_draft(row):
            return
        before = sum(states.shape[0] for own in self.rows.values() for states in own.hidden)
        if before and before + sum(states.shape[0] for states in hidden) > UNASKED:
            hidden = [hidden[-1][-1:]]
        self._track(row).hidden = hidden

    def record_hidden_states(self, forward: Forward) -> None:
        """Keep the states (1 + drafts, hidden) from which the rows' next tokens are drawn."""
        if forward.hidden is None:
            return
        for at, (row, place) in enumerate(places(forward.rows)):
            drafts, own = len(forward.drafts.get(row, ())), self.rows.get(row)
            if place or own is None:
                continue
            if drafts:
                own.drawn_from = forward.hidden[at : at + 1 + drafts]
            else:
                own.add_hidden(forward.hidden[at : at + 1])

    def may_draft(self, plan: StepPlan) -> bool:
        """Whether a step with this plan may have drafts."""
        beside = plan.chunk is None or self.policy.beside_prompts
        return bool(self.sources and plan.rows) and beside

    def plan_drafts(self, rows: Sequence[Row], seconds: Seconds) -> tuple[Mapping[Row, Asks], bool]:
        """What to ask the drafters for, and whether any row has predicted text that pays."""
        asked = self._choose(rows, seconds)
        # the first token of a run is drawn already
        return asked, any(self._predicted_drafts(row, len(rows), seconds, drawn=1) for row in rows)

    def _choose(self, rows: Sequence[Row], seconds: Seconds) -> dict[Row, Asks]:
        opened = [breaker for breaker in self._breakers if not breaker.closed]
        for breaker in opened:
            breaker.record_success(used=False)
        if len(opened) == len(self._breakers):
            return {}
        known = [self.rows[row].rates for row in rows if row in self.rows]
        left_out = len(known) == len(rows) and self.policy.asks_none(known)
        rates = {} if left_out else {row: self._rates_of(row) for row in rows}
        able = {row: own for row, own in rates.items() if any(own)}
        chosen = self.policy.choose([*able.values()], len(rows) - len(able), seconds)
        self.policy.end_step()
        found: dict[Row, Asks] = {}
        for row, asks in zip(able, chosen, strict=True):
            left = row.request.max_tokens - len(row.tokens) - 1
            if asks and left > 0:
                found[row] = tuple(Ask(ask.source, min(ask.drafts, left)) for ask in asks)
        return found

    def make_drafts(
        self, rows: Sequence[Row], seconds: Seconds, asked: Mapping[Row, Asks]
    ) -> Drafts:
        """Ask the drafters, once all tokens are read. Returns the predicted text and the guesses
        that the rows' grammars allow. `asked`: from `plan_drafts`."""
        unfinished = [row for row in rows if row.finish is None]
        known = {row: self._predicted_drafts(row, len(rows), seconds) for row in unfinished}
        guesses = self.propose(asked)
        guessed = {row: own for row, (own, _) in guesses.items()}
        guessed |= {row: after_run(run, guessed.get(row, ())) for row, run in known.items() if run}
        drafts: dict[Row, Sequence[int]] = {}
        for row, own in guessed.items():
            source = guesses[row][1] if row in guesses else None
            allowed = let_through(row, own)
            refused = len(allowed) < len(own)
            if allowed:
                drafts[row] = allowed
                self._track(row).origin = Origin(len(known.get(row, ())), source, refused)
            elif refused and source is not None and row in self.rows:
                self.policy.learn(source, self.rows[row].rates[source], 1, 0)
        return drafts

    def propose(self, wanted: Mapping[Row, Asks]) -> dict[Row, tuple[Sequence[int], int]]:
        """The guess of each row that has one, with the index of its drafter. Never raises."""
        self._last_drafting, self._asked = (0.0, 0), set()
        if not wanted:
            return {}
        began = self.clock()
        left = {row: asks for row, asks in wanted.items() if row.finish is None}
        guesses: dict[Row, tuple[Sequence[int], int]] = {}
        all_ready = True
        while left:
            # the last drafters come first: they need no device, and the rows that they leave are
            # asked for together
            source = max(asks[0].source for asks in left.values())
            asked = {row: asks[0] for row, asks in left.items() if asks[0].source == source}
            found = self._ask(source, asked)
            all_ready = all_ready and found.keys() == asked.keys()
            guesses |= {row: (own, source) for row, own in found.items() if own}
            rest = {row: asks[1:] if row in asked else asks for row, asks in left.items()}
            left = {row: asks for row, asks in rest.items() if asks and row not in guesses}
        rounds = max((len(tokens) for tokens, _ in guesses.values()), default=0)
        self._last_drafting = self.clock() - began, rounds if all_ready else 0
        return guesses

    def _ask(self, source: int, asked: Mapping[Row, Ask]) -> dict[Row, Sequence[int]]:
        """A drafter's guesses, without rows for which it is not ready. A guess may be empty."""
        self._asked.add(source)

        def ask_drafter() -> dict[Row, Sequence[int]]:
            views = [self._view(row, ask) for row, ask in asked.items()]
            guesses = self.sources[source].drafting.propose(views)
            found = {
                row: self._check(own, ask.drafts)
                for (row, ask), own in zip(asked.items(), guesses, strict=True)
                if own is not None
            }
            for view in views:
                view.hidden = None
            return found

        drafts = attempt(ask_drafter)
        if isinstance(drafts, Fault):
            log.error("the drafter failed; rows continue without drafts\n%s", drafts.trace)
            self._breakers[source].record_failure()
            for tracked in self.rows.values():
                tracked.seen[source] = None
                if self.sources[source].hidden_model is not None:
                    tracked.hidden, tracked.drawn_from = [], None
            return {}
        self._breakers[source].record_success(used=True)
        for row, own in drafts.items():
            if not own:
                self.policy.learn(source, self.rows[row].rates[source], 0, 0)
        return drafts

    def _check(self, guesses: Sequence[int], count: int) -> Sequence[int]:
        """At most `count` guesses, up to the first invalid token. Those on the device are not read;
        the pass replaces invalid ones, and these are not accepted."""
        if isinstance(guesses, DeviceTokens):
            return guesses.first(count)
        return list(takewhile(range(self._vocab).__contains__, map(int, islice(guesses, count))))

    def _view(self, row: Row, ask: Ask) -> DraftRow:
        own = self.rows[row]
        seen = own.seen[ask.source]
        if seen is None:
            seen = own.seen[ask.source] = DraftRow(row.all_tokens, salt=row.request.salt)
        seen.tokens.extend(row.tokens[len(seen.tokens) - len(row.request.prompt.tokens) :])
        seen.wanted = ask.drafts
        if self.sources[ask.source].hidden_model is not None:
            seen.hidden = mx.concatenate(own.hidden) if own.hidden else None
            seen.fresh = 0 if seen.hidden is None else seen.hidden.shape[0]
            own.hidden, own.drawn_from = [], None
        return seen

    def _track(self, row: Row) -> DraftedRow:
        if row not in self.rows:
            count = len(self.sources)
            self.rows[row] = DraftedRow([RowAcceptance() for _ in range(count)], [None] * count)
        return self.rows[row]

    def _rates_of(self, row: Row) -> list[RowAcceptance | None]:
        """`None`: the drafter cannot draft for the row now. Empty: none can."""
        if not can_draft(row):
            return []
        own = self._track(row)
        has_states = bool(own.hidden) or own.drawn_from is not None
        return [
            rate
            if breaker.closed
            and (source.media or not row.request.prompt.spans)
            and (source.hidden_model is None or has_states)
            else None
            for rate, source, breaker in zip(own.rates, self.sources, self._breakers, strict=True)
        ]

    def follow(self, row: Row, token: int) -> None:
        """Compare a row's next token with its predicted text, and advance its predictor."""
        predicted = predict(row, token) if self.sources else ()
        if predicted and (own := self.rows.get(row)) is not None:
            self.policy.predicted.learn_both(own.predicted, int(predicted[0] == token))

    def _predicted_drafts(
        self, row: Row, rows: int, seconds: Seconds, *, drawn: int = 0
    ) -> Sequence[int]:
        """As much predicted text of a row as pays in a pass of `rows` rows. `drawn`: number of its
        first tokens that are drawn already, so they are no drafts."""
        predictable = row.constraint is not None or row.predictor is not None
        able = predictable and row in self.rows and can_draft(row)
        if not (able and any(breaker.closed for breaker in self._breakers)):
            return ()
        run, certain = known_run(row)
        if len(run) <= drawn:
            return ()
        chance = self.policy.predicted.chance(self.rows[row].predicted)
        chances = [1.0 if at < certain else chance for at in range(drawn, len(run))]
        worth = self.policy.known_drafts(chances, rows, seconds)
        return run[drawn : drawn + worth]

    def record_idle(self, drafts: Drafts, seconds: float) -> None:
        """The device idled for `seconds` before a pass with `drafts`."""
        known = any(self.rows[row].origin.known for row in drafts)
        guessing, rounds = self._last_drafting
        self._kind = KNOWN_TEXT.union(self._asked) if known else frozenset(self._asked)
        idle = max(0.0, seconds - guessing)
        self.policy.costs[self._kind].add_times(idle, guessing, rounds)
        if known and self._asked:
            self.policy.costs[KNOWN_TEXT].add_times(idle, 0.0, 0)

    def record_pass(self, drafts: int, times: float) -> None:
        """A pass with so many drafts took `times` its expected duration. 0: unknown."""
        if drafts and times:
            self.policy.costs[self._kind].add_pass(drafts, times)

    def record_accepted(self, row: Row, drafts: int, accepted: int) -> None:
        """The model has accepted the first `accepted` of a row's `drafts`."""
        row.request.drafted += drafts
        row.request.accepted += accepted
        own = self.rows.get(row)
        if own is None or not drafts:
            return
        origin, right = own.origin, accepted - own.origin.known
        guessed = drafts - origin.known + origin.refused
        if origin.source is not None and guessed > 0 and right >= 0:
            self.policy.learn(origin.source, own.rates[origin.source], guessed, right)
        if own.drawn_from is not None:
            own.add_hidden(own.drawn_from[: accepted + 1])
            own.drawn_from = None

    def forget(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.rows.pop(row, None)


def source_of(drafter: Drafter, drafting: Drafting, model: LoadedModel) -> Source:
    hidden_model = model if drafter.hidden and isinstance(model, HiddenStatesModel) else None
    return Source(drafting, hidden_model, drafter.media)


def can_draft(row: Row) -> bool:
    """Whether a row may have drafts: it has a first token and has not ended."""
    return row.request.drafts and row.finish is None and bool(row.tokens)
