"""Requests and decisions as JSON, and as another rank takes them up."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine.inputs import Inputs
from ..engine.request import PrefillJob, Request, Row, RowConstraint, SamplingParams
from ..engine.scheduling.plan import Chunk, StepPlan
from ..engine.scheduling.scheduler import Scheduler
from ..errors import RankLost
from ..protocol.event_queue import EventQueue
from ..protocol.events import Delta, FinishReason, TokenLogprob
from ..records import MediaSpan, Prompt


class DecodedText:
    """Output of a row whose text rank 0 makes."""

    stopped = False
    reasoning_tokens = 0

    def push(self, token: int, logprob: TokenLogprob | None = None) -> list[Delta]:
        return []

    def finish(self, reason: FinishReason) -> tuple[list[Delta], FinishReason]:
        return [], reason


class DecodedConstraint:
    """Grammar of a row whose masks rank 0 makes."""

    finished = False

    def mask(self) -> NDArray[np.uint32] | None:
        return None

    def advance(self, token: int) -> None:
        """Rank 0 does."""

    def fork(self) -> RowConstraint | None:
        return None


# -- requests


def encode_request(request: Request) -> dict[str, Any]:
    """What passes depend on, of a request."""
    prompt = request.prompt
    spans = [(span.start, span.end, span.content_hash) for span in prompt.spans]
    return {
        "id": request.id,
        "tokens": list(map(int, prompt.tokens)),
        "spans": spans,
        "positions": None if prompt.positions is None else _pack(prompt.positions),
        "rope_delta": int(prompt.rope_delta),
        "snapshot_points": list(map(int, prompt.snapshot_points)),
        "max_tokens": request.max_tokens,
        "constrained": [row.constraint is not None for row in request.rows],
        "salt": request.salt,
        "session": request.session,
        "logprobs": request.logprobs,
        "echoed": request.echoed,
        "drafts": request.drafts,
        "inputs": _encode_inputs(request.inputs),
    }


def decode_request(encoded: Mapping[str, Any]) -> Request:
    """The same request on another rank, where nobody reads its events."""
    positions = encoded["positions"]
    prompt = Prompt(
        tokens=encoded["tokens"],
        spans=[MediaSpan(start, end, content, None) for start, end, content in encoded["spans"]],
        positions=None if positions is None else _unpack(positions),
        rope_delta=encoded["rope_delta"],
        snapshot_points=encoded["snapshot_points"],
    )
    request = Request(
        encoded["id"],
        prompt,
        SamplingParams(temperature=0.0),
        encoded["max_tokens"],
        EventQueue(),
        salt=encoded["salt"],
        session=encoded["session"],
        logprobs=encoded["logprobs"],
        echoed=encoded["echoed"],
        drafts=encoded["drafts"],
        may_skip=False,
        inputs=_decode_inputs(encoded["inputs"]),
    )
    request.rows = [
        Row(request, at, DecodedText(), DecodedConstraint() if constrained else None)
        for at, constrained in enumerate(encoded["constrained"])
    ]
    return request


def _encode_inputs(inputs: Inputs | None) -> dict[str, Any] | None:
    if inputs is None:
        return None
    return {
        "tokens": [list(each) for each in inputs.tokens],
        "pooling": inputs.pooling,
        "dimensions": inputs.dimensions,
        "normalise": inputs.normalise,
    }


def _decode_inputs(encoded: Mapping[str, Any] | None) -> Inputs | None:
    return None if encoded is None else Inputs(**encoded)


def _pack(positions: NDArray[np.int32]) -> list[Any]:
    whole = np.ascontiguousarray(positions, np.int32)
    return [list(whole.shape), b64encode(whole.tobytes()).decode()]


def _unpack(encoded: Sequence[Any]) -> NDArray[np.int32]:
    shape, data = encoded
    return np.frombuffer(b64decode(data), np.int32).reshape(shape)


# -- decisions


class Codec:
    """Rows, prompts and plans of one engine, by names that hold on every rank.

    Each `decode_` raises `RankLost` for what is not on this rank.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def encode_row(self, row: Row) -> Any:
        return [row.request.id, row.index]

    def decode_row(self, encoded: Any) -> Row:
        for row in self._scheduler.running:
            if self.encode_row(row) == encoded:
                return row
        raise _missing(encoded)

    def encode_overflow(self, found: tuple[Row, bool] | None) -> Any:
        return None if found is None else [self.encode_row(found[0]), found[1]]

    def decode_overflow(self, encoded: Any) -> tuple[Row, bool] | None:
        return None if encoded is None else (self.decode_row(encoded[0]), bool(encoded[1]))

    def encode_job(self, job: PrefillJob | None) -> Any:
        return None if job is None else [self._scheduler.waiting.index(job), job.request.id]

    def decode_job(self, encoded: Any) -> PrefillJob | None:
        if encoded is None:
            return None
        at, name = encoded
        for job in self._scheduler.waiting[at : at + 1]:
            if job.request.id == name:
                return job
        raise _missing(encoded)

    def encode_plan(self, decided: tuple[StepPlan, Mapping[Row, int]]) -> Any:
        plan, wanted = decided
        chunk = plan.chunk
        part = None if chunk is None else [self.encode_job(chunk.job), chunk.start, chunk.stop]
        return [len(plan.rows), part, plan.mixed, self.encode_drafts(wanted)]

    def decode_plan(self, encoded: Any) -> tuple[StepPlan, Mapping[Row, int]]:
        """Raises `RankLost` where other rows decode here, too."""
        count, part, mixed, wanted = encoded
        rows = tuple(self._scheduler.running) if count else ()
        if len(rows) != count:
            raise RankLost(f"{len(rows)} rows decode here, {count} on rank 0")
        chunk = None
        if part is not None:
            job = self.decode_job(part[0])
            if job is None:
                raise _missing(part)
            if job.done != part[1]:
                raise RankLost(f"a prompt has {job.done} tokens here, {part[1]} on rank 0")
            chunk = Chunk(job, part[1], part[2])
        return StepPlan(rows, chunk, mixed=mixed), self.decode_drafts(wanted)

    def encode_drafts(self, drafts: Mapping[Row, Any]) -> Any:
        """Numbers or tokens by row."""
        return [[self.encode_row(row), own] for row, own in drafts.items()]

    def decode_drafts(self, encoded: Any) -> dict[Row, Any]:
        return {self.decode_row(row): own for row, own in encoded}


def _missing(encoded: Any) -> RankLost:
    return RankLost(f"rank 0 names {encoded}, which is not on this rank")
