"""Encodes requests and decisions as JSON, and decodes them on another rank."""

from __future__ import annotations

import time
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_provider.errors import ProcessLost, RequestFailed
from mlx_provider.records import MediaSpan, Prompt
from mlx_provider.replicas.engine import (
    Admitted,
    CaughtUp,
    Chunk,
    Cut,
    Decision,
    Delta,
    Ended,
    EventQueue,
    FinishReason,
    Inputs,
    Opening,
    Outcome,
    Preempted,
    PrefillJob,
    Request,
    Row,
    RowConstraint,
    SamplingParams,
    Scheduler,
    Scores,
    StepPlan,
    StepRecord,
    Submitted,
    TokenLogprob,
    Vectors,
)


class DecodedText:
    """The output of a row on a follower. Rank 0 makes the text."""

    stopped = ""
    reasoning_tokens = 0

    def push(self, token: int, logprob: TokenLogprob | None = None) -> list[Delta]:
        return []

    def finish(self, reason: FinishReason) -> tuple[list[Delta], FinishReason]:
        return [], reason


class DecodedConstraint:
    """The grammar of a row on a follower. Rank 0 makes the masks."""

    finished = False

    def mask(self) -> NDArray[np.uint32] | None:
        return None

    def advance(self, token: int) -> None:
        """Does nothing: rank 0 advances the grammar."""

    def forced(self) -> Sequence[int]:
        return ()

    def fork(self) -> RowConstraint | None:
        return None


# -- requests


def encode_request(request: Request) -> dict[str, Any]:
    """The parts of a request that affect passes."""
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
        "retain": request.retain,
        "logprobs": request.logprobs,
        "echoed": request.echoed,
        "drafts": request.drafts,
        "inputs": _encode_inputs(request.inputs),
    }


def decode_request(encoded: Mapping[str, Any]) -> Request:
    """The same request on another rank, without a reader of events."""
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
        retain=encoded["retain"],
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
    tokens = [list(each) for each in inputs.tokens]
    if isinstance(inputs, Scores):
        return {"tokens": tokens, "shared": inputs.shared, "yes": inputs.yes, "no": inputs.no}
    if isinstance(inputs, Vectors):
        names = ("pooling", "dimensions", "normalise")
        return {"tokens": tokens, **{name: getattr(inputs, name) for name in names}}
    raise TypeError(type(inputs).__name__)


def _decode_inputs(encoded: Mapping[str, Any] | None) -> Inputs | None:
    if encoded is None:
        return None
    return Scores(**encoded) if "yes" in encoded else Vectors(**encoded)


def _pack(positions: NDArray[np.int32]) -> list[Any]:
    whole = np.ascontiguousarray(positions, np.int32)
    return [list(whole.shape), b64encode(whole.tobytes()).decode()]


def _unpack(encoded: Sequence[Any]) -> NDArray[np.int32]:
    shape, data = encoded
    return np.frombuffer(b64decode(data), np.int32).reshape(shape)


# -- decisions

KINDS: Mapping[type, str] = {
    Submitted: "submit",
    Ended: "ended",
    Preempted: "preempted",
    Cut: "cut",
    Admitted: "admitted",
    CaughtUp: "caught up",
}
FAILED = "failed"
"""In place of the reason for which a row ends."""


def encode_outcome(outcome: Outcome) -> Any:
    return FAILED if outcome.error is not None else outcome.reason


def decode_outcome(encoded: Any) -> Outcome:
    if encoded == FAILED:
        return Outcome(error=RequestFailed("it has failed on rank 0"))
    return Outcome(reason=encoded)


class Codec:
    """Encodes and decodes decisions of one engine; rows and prompts have the same names on all
    ranks.

    Each `decode_` raises `ProcessLost` for a row or prompt that is not on this rank.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def encode_decision(self, decision: Decision) -> dict[str, Any]:
        match decision:
            case Submitted(request):
                return encode_request(request)
            case Ended(request):
                return {"id": request.id}
            case Preempted(row):
                return {"row": self._encode_row(row)}
            case Cut(row, outcome):
                return {"row": self._encode_row(row), "outcome": encode_outcome(outcome)}
            case Admitted(job):
                return {"job": self._encode_job(job)}
            case CaughtUp():
                return {}

    def decode_opening(self, message: Mapping[str, Any]) -> Opening:
        match message["kind"]:
            case "preempted":
                return Preempted(self._decode_row(message["row"]))
            case "cut":
                return Cut(self._decode_row(message["row"]), decode_outcome(message["outcome"]))
            case "admitted":
                return Admitted(self._decode_job(message["job"]))
            case _:
                return CaughtUp()

    def encode_record(self, record: StepRecord) -> Any:
        plan, chunk = record.plan, record.plan.chunk
        part = None if chunk is None else [self._encode_job(chunk.job), chunk.start, chunk.stop]
        drafts = [[self._encode_row(row), list(own)] for row, own in record.drafts.items()]
        embedded = None if plan.embedded is None else self._encode_job(plan.embedded)
        return [len(plan.rows), part, plan.mixed, drafts, record.caught_up, embedded]

    def decode_record(self, encoded: Any) -> StepRecord:
        """Raises `ProcessLost` if other rows decode on this rank."""
        count, part, mixed, drafts, caught_up, embedded = encoded
        rows = tuple(self._scheduler.running) if count else ()
        if len(rows) != count:
            raise ProcessLost(f"{len(rows)} rows decode here, {count} on rank 0")
        chunk = None
        if part is not None:
            job = self._decode_job(part[0])
            if job.done != part[1]:
                raise ProcessLost(f"a prompt has {job.done} tokens here, {part[1]} on rank 0")
            chunk = Chunk(job, part[1], part[2])
        return StepRecord(
            time.monotonic(),
            StepPlan(
                rows,
                chunk,
                mixed=mixed,
                embedded=None if embedded is None else self._decode_job(embedded),
            ),
            drafts={self._decode_row(row): own for row, own in drafts},
            caught_up=caught_up,
        )

    def _encode_row(self, row: Row) -> Any:
        return [row.request.id, row.index]

    def _decode_row(self, encoded: Any) -> Row:
        for row in self._scheduler.running:
            if self._encode_row(row) == encoded:
                return row
        raise _missing(encoded)

    def _encode_job(self, job: PrefillJob) -> Any:
        return [self._scheduler.waiting.index(job), job.request.id]

    def _decode_job(self, encoded: Any) -> PrefillJob:
        at, name = encoded
        for job in self._scheduler.waiting[at : at + 1]:
            if job.request.id == name:
                return job
        raise _missing(encoded)


def _missing(encoded: Any) -> ProcessLost:
    return ProcessLost(f"rank 0 names {encoded}, which is not on this rank")
