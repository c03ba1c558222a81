"""The state of one request. Everything else is derived from it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import MLXProviderError
from ..protocol.event_queue import EventQueue
from ..protocol.events import Delta, FinishReason, TokenLogprob
from ..records import MediaSpan, Prompt, Scoring

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .inputs import Inputs
    from .prefix_cache.buffers import Lease
    from .prefix_cache.disk import Restore
    from .prefix_cache.tree import Ids, Match


class Phase(enum.Enum):
    """Moves forward, or back if one of its rows is preempted or runs again."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


@dataclass(eq=False)
class Request:
    """A prompt with its parameters, its rows and its progress."""

    id: str
    prompt: Prompt
    params: SamplingParams
    max_tokens: int
    events: EventQueue
    rows: list[Row] = field(default_factory=list)
    min_tokens: int = 0
    stop_tokens: frozenset[int] = frozenset()
    logprobs: int | None = None  # how many alternatives to report per token; `None`: no logprobs
    salt: str = ""  # only requests with the same one share stored prefixes
    tenant: str = ""
    """Whose request it is. The device is shared between tenants."""
    share: float = 1.0  # share of the device of its tenant, relative to others
    session: str | None = None
    retain: bool = False  # whether the client has announced that its session comes back
    drafts: bool = True
    deadline: float | None = None
    """Monotonic time after which the request ends in `RequestTimedOut`."""

    phase: Phase = Phase.WAITING
    cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    stored_tokens: int = 0  # further prompt tokens that the prefix cache has stored since
    prefilled_tokens: int = 0  # tokens that its chunks have run, again after a preemption
    drafted: int = 0
    accepted: int = 0
    looked_up: bool = False
    """Whether its use of the prefix cache was counted: once, also if its prefill starts again."""
    explanation: str = ""  # why the prefix cache did not hold more of the prompt

    arrived: float = 0.0
    queued: float = 0.0
    """When it was queued. Time before (for example to load a model) gives no precedence."""
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    # -- of images, texts to embed, log-probabilities of prompts, and sparse prefill
    features: dict[str, Any] = field(default_factory=dict)
    """Of the prompt's media, by content hash, while they are needed."""
    inputs: Inputs | None = None
    """Texts to embed, in place of a reply. The prompt is then the longest of them."""
    echoed: bool = False  # whether prompt tokens get log-probabilities, too (with `logprobs`)
    prompt_logprobs_sent: int = 0
    may_skip: bool = True  # whether its prompt may be prefilled sparsely
    selected: Sequence[int] | None = None
    """Ascending positions of the prompt tokens that are computed. `None`: all."""
    prefilling: str = ""  # why its long prompt was, or was not, prefilled sparsely

    @property
    def background(self) -> bool:
        """Whether it prefills the beginning of a prompt that will come. It has no reply."""
        return self.max_tokens == 0 and self.inputs is None

    @property
    def skipped_tokens(self) -> int:
        """Prompt tokens that are never computed."""
        return 0 if self.selected is None else len(self.prompt.tokens) - len(self.selected)

    @property
    def unfinished_rows(self) -> list[Row]:
        return [row for row in self.rows if row.finish is None]

    def unlink(self) -> None:
        """Call it when the request has ended: it and its rows refer to each other, so its prompt
        and images would stay in memory until the garbage collector runs."""
        self.rows = []

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
class Row:
    """One choice of a request, decoded as one row of the batch."""

    request: Request
    index: int
    output: RowOutput
    constraint: RowConstraint | None = None
    predictor: TextPredictor | None = None
    tokens: list[int] = field(default_factory=list)
    """Committed tokens: drawn and read back. `output` gets all but stop tokens."""
    finish: FinishReason | None = None
    error: MLXProviderError | None = None
    """A fault of its grammar. Its request ends with the row's next token."""
    corrupted: bool = False  # its last pass has failed (`_launch`), so its cache is not stored
    retry_alone: bool = False  # its last pass or draw has failed, so its next one has no other row

    lease: Lease | None = None
    """What it uses of the prefix cache: perhaps a `Claim` once admitted, then its buffers."""
    merged_length: int = 0
    """Tokens of the longest row in its shared cache after the next pass. 0: it has its own."""
    gave_way: bool = False  # whether it has freed its memory for other rows
    history: Any = None  # token counts of the sampler, if the row has penalties
    masks: list[Any] = field(default_factory=list)
    """Grammar masks before and after each of its drafts, while it has any."""

    @property
    def length(self) -> int:
        return len(self.request.prompt.tokens) + len(self.tokens)

    @property
    def length_to_cache(self) -> int:
        """Committed tokens that its cache must hold."""
        selected = self.request.selected  # read for every row in every step
        prompt = self.request.prompt.tokens if selected is None else selected
        return len(prompt) + len(self.tokens)

    @property
    def all_tokens(self) -> list[int]:
        return [*self.request.prompt.tokens, *self.tokens]


@dataclass(eq=False)
class PrefillJob:
    """Tokens to prefill before `rows` can decode. A new request has one job for all its rows, or
    for all its inputs in turn. A row that is preempted, or whose pass fails, has its own job, with
    its committed tokens (not for a reproducible model: there, decode passes run them again)."""

    request: Request
    rows: list[Row]
    tokens: Sequence[int]
    admitted: bool = False
    waited_seconds: float = 0.0
    """Seconds that it waited until its admission, and since then while other prompts ran."""
    computed_tokens: int = 0  # tokens that `cache` holds, those from the prefix cache included
    cache: list[Any] | None = None
    cuts: Sequence[int] = ()  # ascending token counts at which a chunk must end
    snapshots_at: Sequence[int] = ()  # ascending token counts at which a state is worth keeping
    snapshots: dict[int, Any] = field(default_factory=dict)
    ids: Ids | None = None
    """Token ids for the prefix cache. `None`: it was not asked."""
    match: Match | None = None  # the last look-up, until its prefill begins
    restore: Restore | None = None
    """`None`: it needs no files from disk, or has not begun. When it has ended, it has a cache,
    unless no file could be read."""
    estimated_cached: int = 0  # tokens that the last look-up found, in memory or on disk

    # -- of drafters and sparse prefill
    hidden: list[Any] = field(default_factory=list)
    """Hidden states (n, hidden) after its last tokens so far, if a drafter needs them."""
    positions: Sequence[int] | None = None
    """Positions of the tokens, if some tokens of the prompt were left out."""
    scoring: Scoring | None = None  # nothing is prefilled before it ends
    pieces: int = 0  # scored pieces so far

    @property
    def restoring(self) -> bool:
        """Whether it waits for the disk. It runs nothing until then."""
        return self.restore is not None and not self.restore.ended

    @property
    def wants_prompt_logprobs(self) -> bool:
        """If so, all tokens must run."""
        request = self.request
        return request.echoed and request.prompt_logprobs_sent < len(request.prompt.tokens)

    @property
    def own_pass(self) -> bool:
        """Whether it shares no pass of the rows."""
        return self.request.inputs is not None or self.wants_prompt_logprobs

    @property
    def tokens_left(self) -> int:
        """Tokens to compute: by estimate until its prefill begins."""
        return len(self.tokens) - max(self.computed_tokens, self.estimated_cached)

    @property
    def request_tokens_left(self) -> int:
        """Also of the request's later inputs."""
        return self.tokens_left + (self.request.inputs.later_tokens if self.request.inputs else 0)

    @property
    def text_follows(self) -> bool:
        return all(span.end <= self.computed_tokens for span in self.request.prompt.spans)

    @property
    def spans_to_embed(self) -> list[MediaSpan]:
        """The media left to prefill that have no features yet, each once."""
        known = self.request.features
        spans = {
            span.content_hash: span
            for span in self.request.prompt.spans
            if span.end > self.computed_tokens and span.content_hash not in known
        }
        return list(spans.values())

    @property
    def prompt(self) -> Prompt:
        """The request's prompt with the committed tokens to run again, or the current input."""
        inputs, prompt = self.request.inputs, self.request.prompt
        if inputs is not None:
            return Prompt(self.tokens)
        return prompt.followed_by(self.tokens[len(prompt.tokens) :])

    @property
    def uses_prefix_cache(self) -> bool:
        """The prefix cache needs every token of a prompt to be computed."""
        unfit = (self.positions, self.scoring, self.request.inputs)
        return not self.wants_prompt_logprobs and all(part is None for part in unfit)

    def restart(self) -> None:
        """Discard the computed tokens: a device failure corrupted them, or they are not needed."""
        self.drop_cache()
        self.computed_tokens, self.snapshots, self.hidden = 0, {}, []
        if self.restore is not None:
            self.restore.abandon()
            self.restore = None
        self.scoring, self.pieces = None, 0
        if self.request.inputs is not None:
            self.request.inputs.found = None

    def drop_cache(self) -> None:
        self.cache = None
        for row in self.rows:
            row.lease = None

    def leave_prefix(self) -> None:
        """Use no stored prefix, so that the selection of tokens does not depend on it."""
        self.drop_cache()
        if self.restore is not None:
            self.restore.cache = None
        self.computed_tokens, self.estimated_cached, self.match = 0, 0, None
        if not any(row.tokens for row in self.rows):  # else this is not the first prefill
            self.request.cached_tokens = 0

    def thin_out(self, selected: Sequence[int]) -> None:
        """Run only these tokens of the prompt, and all tokens after it."""
        prompt = len(self.request.prompt.tokens)
        self.positions = [*selected, *range(prompt, len(self.tokens))]
        self.tokens = [self.tokens[at] for at in self.positions]
        self.cuts, self.snapshots_at = (), ()  # they count tokens that were left out

    def row_cache(self) -> list[Any]:
        if self.cache is None:
            raise RuntimeError("the prefill has not begun")
        return self.cache


@dataclass(frozen=True)
class SamplingParams:
    """The request's own values, else those of the model, else neutral ones."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # from the client, or drawn once at admission

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncated(self) -> bool:
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @cached_property
    def penalised(self) -> bool:
        added = self.presence_penalty or self.frequency_penalty
        return bool(added) or self.repetition_penalty != 1

    @cached_property
    def plain(self) -> bool:
        """Whether the row is greedy and nothing changes its logits. Read for each token."""
        return self.greedy and not self.penalised and not self.logit_bias


class RowOutput(Protocol):
    """Turns the tokens of one choice into deltas (host work, per token)."""

    stopped: str  # the stop string that has matched; empty: none

    @property
    def reasoning_tokens(self) -> int: ...

    def push(self, token: int, logprob: TokenLogprob | None = None) -> list[Delta]:
        """Returns the deltas that can be shown now."""

    def finish(self, reason: FinishReason) -> tuple[list[Delta], FinishReason]:
        """Return the text that was held back, and the final finish reason."""


class RowConstraint(Protocol):
    """Grammar of one choice."""

    def mask(self) -> NDArray[np.uint32] | None:
        """Allowed tokens as bits, (ceil(vocab / 32),). `None`: every token is allowed."""

    def advance(self, token: int) -> None: ...

    @property
    def finished(self) -> bool:
        """Whether only the end may follow."""

    def forced_tokens(self) -> Sequence[int]:
        """Next tokens of which each is the only one that `mask` allows there, as far as known."""

    def fork(self) -> RowConstraint | None:
        """An independent copy in the same state. `None`: the constraint cannot be copied."""


class TextPredictor(Protocol):
    """Predicts the text of one choice. It restricts nothing."""

    def likely(self) -> Sequence[int]:
        """Tokens that probably follow; empty: nothing is known."""

    def advance(self, token: int) -> None: ...
