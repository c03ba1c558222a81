"""One request's whole state; everything else is derived from it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import MLXProviderError
from ..protocol.event_queue import EventQueue
from ..protocol.events import Delta, FinishReason, TokenLogprob
from ..records import Prompt, Scoring

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .inputs import Inputs


class Phase(enum.Enum):
    """Where a request is; it only moves forward."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


class RowOutput(Protocol):
    """Turns one choice's tokens into deltas (host work, per token)."""

    stopped: bool
    """A stop string has matched."""

    @property
    def reasoning_tokens(self) -> int:
        """Tokens so far that belong to reasoning."""

    def push(self, token: int, logprob: TokenLogprob | None = None) -> list[Delta]:
        """Take one token; what can be shown now."""

    def finish(self, reason: FinishReason) -> tuple[list[Delta], FinishReason]:
        """Show what was held back; the true finish reason."""


class RowConstraint(Protocol):
    """Grammar of one choice."""

    def mask(self) -> NDArray[np.uint32] | None:
        """Allowed tokens as bits, (ceil(vocab / 32),); `None`: every token is allowed."""

    def advance(self, token: int) -> None:
        """Take the token that was drawn."""

    @property
    def finished(self) -> bool:
        """Nothing but the end may follow."""

    def fork(self) -> RowConstraint | None:
        """An independent one in the same state; `None`: what follows cannot be foreseen."""


class Restore(Protocol):
    """Brings a prefix from disk (`prefix_cache/restore.py`)."""

    ended: bool
    cache: list[Any] | None
    """What it has brought, once it has ended."""
    length: int

    def abandon(self) -> None:
        """End it at once."""


@dataclass(frozen=True)
class SamplingParams:
    """Resolved sampling of one request: the request's values, else the model's, else neutral."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    """Given by the client, or drawn once at admission."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncated(self) -> bool:
        """Whether tokens of low rank are excluded."""
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @cached_property
    def penalised(self) -> bool:
        """Whether tokens that were written before are less likely."""
        added = self.presence_penalty or self.frequency_penalty
        return bool(added) or self.repetition_penalty != 1

    @cached_property
    def plain(self) -> bool:
        """Greedy, with nothing that changes the logits. Asked for every row in every step."""
        return self.greedy and not self.penalised and not self.logit_bias


@dataclass(eq=False)
class Row:
    """One choice of a request: what decodes as one row of the batch."""

    request: Request
    index: int
    output: RowOutput
    constraint: RowConstraint | None = None
    tokens: list[int] = field(default_factory=list)
    """Committed tokens: drawn, read back, and pushed to `output`."""
    finish: FinishReason | None = None
    error: MLXProviderError | None = None
    """A part of its own work has failed: its request ends with its next token."""
    retry_alone: bool = False
    """Was in a device step that failed: decodes alone once before it joins others again."""

    history: Any = None
    """What the sampler counts for penalties, where there are any."""
    masks: list[Any] = field(default_factory=list)
    """What the grammar lets through before and after each of its drafts, while it has any."""

    @property
    def length(self) -> int:
        """Tokens of prompt and reply that are committed."""
        return len(self.request.prompt.tokens) + len(self.tokens)

    @property
    def held(self) -> int:
        """Those of them that its cache is to hold."""
        return self.length - self.request.skipped

    @property
    def all_tokens(self) -> list[int]:
        return [*self.request.prompt.tokens, *self.tokens]


@dataclass(eq=False)
class Request:
    """A prompt with its parameters, its rows, and where it stands."""

    id: str
    prompt: Prompt
    params: SamplingParams
    max_tokens: int
    events: EventQueue
    """Where its reader waits."""
    rows: list[Row] = field(default_factory=list)
    min_tokens: int = 0
    stop_tokens: frozenset[int] = frozenset()
    logprobs: int | None = None
    """How many alternatives to report per token; `None`: no logprobs."""
    salt: str = ""
    session: str | None = None
    drafts: bool = True
    """Whether tokens may be guessed ahead for it."""
    may_skip: bool = True
    """Whether tokens of its prompt may be left out."""
    echoed: bool = False
    """With `logprobs`: they are told of its prompt's tokens, too."""
    prompt_logprobs_sent: int = 0
    """Tokens of its prompt of which they were."""
    inputs: Inputs | None = None
    """Texts whose vectors it wants, in place of a reply to its prompt, which is the longest."""
    deadline: float | None = None
    """Monotonic time after which the request ends in `RequestTimedOut`."""

    phase: Phase = Phase.WAITING
    cached: int = 0
    """Prompt tokens that came from the prefix cache."""
    prefilled: int = 0
    """Prompt tokens that were computed."""
    kept: Sequence[int] | None = None
    """Ascending places of the prompt's tokens that are computed at all; `None`: every one."""
    prefilling: str = ""
    """Why its long prompt was not, or was, thinned out."""
    drafted: int = 0
    """Tokens that were guessed,"""
    accepted: int = 0
    """and those of them that held."""
    explanation: str = ""
    """Why the prefix cache did not have more of the prompt."""
    features: dict[str, Any] = field(default_factory=dict)
    """Features of the prompt's media by content hash, while they are needed."""

    arrived: float = 0.0
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def skipped(self) -> int:
        """Prompt tokens that are never computed."""
        return 0 if self.kept is None else len(self.prompt.tokens) - len(self.kept)

    @property
    def unfinished(self) -> list[Row]:
        return [row for row in self.rows if row.finish is None]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt, or of all its inputs."""
        return len(self.prompt.tokens) if self.inputs is None else self.inputs.total

    @property
    def completion_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    @property
    def reasoning_tokens(self) -> int:
        return sum(row.output.reasoning_tokens for row in self.rows)


@dataclass(eq=False)
class PrefillJob:
    """Tokens to be run through the model until `rows` can decode.

    One for a new request (all its rows share it); one for each row again after a device
    failure, then with the tokens that the row had already committed. For inputs, one that has
    the tokens of each in turn.
    """

    request: Request
    rows: list[Row]
    tokens: Sequence[int]
    arrived: float = 0.0
    admitted: bool = False
    """Memory is set aside for its rows."""
    aged: float = 0.0
    """Seconds that it waited: until it was admitted, and for chunks of other prompts since."""
    done: int = 0
    """Tokens that `cache` holds."""
    cache: list[Any] | None = None
    cuts: Sequence[int] = ()
    """Ascending token counts at which a chunk must end."""
    keeps: Sequence[int] = ()
    """Ascending token counts whose states are worth keeping."""
    snapshots: dict[int, Any] = field(default_factory=dict)
    """States that were kept on the way, by token count."""
    hidden: list[Any] = field(default_factory=list)
    """Hidden states (n, hidden) after its last tokens so far, where a drafter is shown them."""
    ids: Any = None
    """The tokens as the prefix cache knows them, (tokens,) int64; `None`: there is no cache."""
    match: Any = None
    """What the prefix cache had when the job was queued."""
    restore: Restore | None = None
    """Brings more of the prompt from disk, or has done so; `None`: the disk was not asked."""
    estimated_cached: int = 0
    """Tokens that the prefix cache would provide, as far as is known before the start."""
    places: Sequence[int] | None = None
    """Where the tokens stand, once some of the prompt's were left out."""
    scoring: Scoring | None = None
    """Finds out which may be; until then nothing is prefilled."""
    pieces: int = 0
    """Of that so far,"""
    piece_seconds: float = 0.0
    """and what the last one took."""

    @property
    def restoring(self) -> bool:
        """Whether it waits for the disk: until then it runs nothing."""
        return self.restore is not None and not self.restore.ended

    @property
    def embeds(self) -> bool:
        """Whether vectors are wanted, and no row will decode."""
        return self.request.inputs is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are wanted, which must all be run."""
        request = self.request
        return request.echoed and request.prompt_logprobs_sent < len(request.prompt.tokens)

    @property
    def own_pass(self) -> bool:
        """Whether it shares no work: neither what was kept of others, nor the rows' passes."""
        return self.embeds or self.wants_prompt_logprobs

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.done

    @property
    def cost(self) -> int:
        """Tokens that will have to be computed, as far as is known."""
        return len(self.tokens) - max(self.done, self.estimated_cached)

    @property
    def work(self) -> int:
        """Tokens that will have to be computed until its request needs no prefill."""
        inputs = self.request.inputs
        return self.cost if inputs is None else self.cost + inputs.behind

    @property
    def text_follows(self) -> bool:
        """Whether nothing but text is left to prefill."""
        return all(span.end <= self.done for span in self.request.prompt.spans)

    @property
    def prompt(self) -> Prompt:
        """The request's prompt, with committed tokens of the reply that are run again; or the
        input that runs."""
        if self.embeds:
            return Prompt(self.tokens)
        prompt = self.request.prompt
        return prompt.followed_by(self.tokens[len(prompt.tokens) :])

    @property
    def uses_prefix_cache(self) -> bool:
        """Whether the prefix cache has to do with it: every token of a prompt is computed."""
        return not self.own_pass and self.places is None and self.scoring is None

    def restart(self) -> None:
        """Forget what was computed: a device failure has corrupted it, or nobody wants it."""
        self.cache, self.done, self.snapshots, self.hidden = None, 0, {}, []
        if self.restore is not None:
            self.restore.abandon()
            self.restore = None
        self.scoring, self.pieces = None, 0
        if self.request.inputs is not None:
            self.request.inputs.pooled = None

    def leave_prefix(self) -> None:
        """Take nothing from the prefix cache: a prompt is thinned out alike whatever that has."""
        self.cache, self.done, self.estimated_cached = None, 0, 0
        self.request.cached = 0

    def thin_out(self, kept: Sequence[int]) -> None:
        """Run these tokens of the prompt alone, and all that follow it."""
        prompt = len(self.request.prompt.tokens)
        self.places = [*kept, *range(prompt, len(self.tokens))]
        self.tokens = [self.tokens[at] for at in self.places]

    def go_on_with(self, tokens: Sequence[int]) -> None:
        """Begin the request's next input."""
        self.restart()
        self.tokens = tokens

    def held(self) -> list[Any]:
        """The cache. Raises `RuntimeError` before the prefill has begun."""
        if self.cache is None:
            raise RuntimeError("the prefill has not begun")
        return self.cache
