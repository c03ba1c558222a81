"""Requests and decisions as they are told to other ranks, and as these take them up."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import RankLost
from ..protocol.event_queue import EventQueue
from ..protocol.events import Delta, FinishReason, TokenLogprob
from ..records import MediaSpan, Prompt
from .inputs import Inputs
from .request import PrefillJob, Request, Row, RowConstraint, SamplingParams
from .scheduling.plan import Chunk, StepPlan
from .scheduling.scheduler import Scheduler

T = TypeVar("T")


class HeardText:
    """Output of a row whose text rank 0 makes."""

    stopped = False
    reasoning_tokens = 0

    def push(self, token: int, logprob: TokenLogprob | None = None) -> list[Delta]:
        return []

    def finish(self, reason: FinishReason) -> tuple[list[Delta], FinishReason]:
        return [], reason


class HeardConstraint:
    """Grammar of a row whose masks rank 0 makes."""

    finished = False

    def mask(self) -> NDArray[np.uint32] | None:
        return None

    def advance(self, token: int) -> None:
        """Rank 0 does."""

    def fork(self) -> RowConstraint | None:
        return None


# -- requests


def request_told(request: Request) -> dict[str, Any]:
    """What of a request passes depend on."""
    prompt = request.prompt
    spans = [(span.start, span.end, span.content_hash) for span in prompt.spans]
    return {
        "id": request.id,
        "tokens": list(map(int, prompt.tokens)),
        "spans": spans,
        "positions": None if prompt.positions is None else _packed(prompt.positions),
        "rope_delta": int(prompt.rope_delta),
        "snapshot_points": list(map(int, prompt.snapshot_points)),
        "max_tokens": request.max_tokens,
        "constrained": [row.constraint is not None for row in request.rows],
        "salt": request.salt,
        "session": request.session,
        "logprobs": request.logprobs,
        "echoed": request.echoed,
        "drafts": request.drafts,
        "inputs": _inputs_told(request.inputs),
    }


def request_heard(told: Mapping[str, Any]) -> Request:
    """The same request on another rank: nobody reads its events there."""
    positions = told["positions"]
    prompt = Prompt(
        tokens=told["tokens"],
        spans=[MediaSpan(start, end, content, None) for start, end, content in told["spans"]],
        positions=None if positions is None else _unpacked(positions),
        rope_delta=told["rope_delta"],
        snapshot_points=told["snapshot_points"],
    )
    request = Request(
        told["id"],
        prompt,
        SamplingParams(temperature=0.0),
        told["max_tokens"],
        EventQueue(),
        salt=told["salt"],
        session=told["session"],
        logprobs=told["logprobs"],
        echoed=told["echoed"],
        drafts=told["drafts"],
        may_skip=False,
        inputs=_inputs_heard(told["inputs"]),
    )
    request.rows = [
        Row(request, at, HeardText(), HeardConstraint() if constrained else None)
        for at, constrained in enumerate(told["constrained"])
    ]
    return request


def _inputs_told(inputs: Inputs | None) -> dict[str, Any] | None:
    if inputs is None:
        return None
    return {
        "tokens": [list(each) for each in inputs.tokens],
        "pooling": inputs.pooling,
        "dimensions": inputs.dimensions,
        "normalise": inputs.normalise,
    }


def _inputs_heard(told: Mapping[str, Any] | None) -> Inputs | None:
    return None if told is None else Inputs(**told)


def _packed(positions: NDArray[np.int32]) -> list[Any]:
    whole = np.ascontiguousarray(positions, np.int32)
    return [list(whole.shape), b64encode(whole.tobytes()).decode()]


def _unpacked(told: Sequence[Any]) -> NDArray[np.int32]:
    shape, data = told
    return np.frombuffer(b64decode(data), np.int32).reshape(shape)


# -- decisions


class Names:
    """How rows and prompts of one engine are named to other ranks, and found there."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def row_told(self, row: Row | None) -> Any:
        return None if row is None else [row.request.id, row.index]

    def row_heard(self, told: Any) -> Row | None:
        """Raises `RankLost` for one that is not here."""
        if told is None:
            return None
        return _found([r for r in self._scheduler.running if self.row_told(r) == told], told)

    def pair_told(self, pair: tuple[Row, bool] | None) -> Any:
        """A row with what is decided about it."""
        return None if pair is None else [self.row_told(pair[0]), pair[1]]

    def pair_heard(self, told: Any) -> tuple[Row, bool] | None:
        """Raises `RankLost` for a row that is not here."""
        return None if told is None else (_found([self.row_heard(told[0])], told), bool(told[1]))

    def job_told(self, job: PrefillJob | None) -> Any:
        if job is None:
            return None
        return [self._scheduler.waiting.index(job), job.request.id]

    def job_heard(self, told: Any) -> PrefillJob | None:
        """Raises `RankLost` for one that is not here."""
        if told is None:
            return None
        at, name = told
        here = [job for job in self._scheduler.waiting[at : at + 1] if job.request.id == name]
        return _found(here, told)

    def plan_told(self, plan: StepPlan) -> Any:
        chunk = plan.chunk
        part = None if chunk is None else [self.job_told(chunk.job), chunk.start, chunk.stop]
        return [len(plan.rows), part, plan.mixed]

    def plan_heard(self, told: Any) -> StepPlan:
        """Raises `RankLost` where other rows decode here."""
        count, part, mixed = told
        rows = tuple(self._scheduler.running) if count else ()
        if len(rows) != count:
            raise RankLost(f"{len(rows)} rows decode here, {count} on rank 0")
        if part is None:
            return StepPlan(rows)
        job = _found([self.job_heard(part[0])], part)
        if job.done != part[1]:
            raise RankLost(f"a prompt has {job.done} tokens here, {part[1]} on rank 0")
        return StepPlan(rows, Chunk(job, part[1], part[2]), mixed=mixed)

    def step_told(self, decided: tuple[StepPlan, Mapping[Row, int]]) -> Any:
        plan, wanted = decided
        return [self.plan_told(plan), self.drafts_told(wanted)]

    def step_heard(self, told: Any) -> tuple[StepPlan, dict[Row, int]]:
        """Raises `RankLost` where other rows decode here."""
        plan, wanted = told
        return self.plan_heard(plan), self.drafts_heard(wanted)

    def drafts_told(self, drafts: Mapping[Row, Any]) -> Any:
        """Numbers or tokens by row."""
        return [[self.row_told(row), own] for row, own in drafts.items()]

    def drafts_heard(self, told: Any) -> dict[Row, Any]:
        """Raises `RankLost` for rows that are not here."""
        return {_found([self.row_heard(row)], row): own for row, own in told}


def _found(here: Sequence[T | None], told: Any) -> T:
    """The one that is here."""
    if not here or here[0] is None:
        raise RankLost(f"rank 0 names {told}, which is not on this rank")
    return here[0]
