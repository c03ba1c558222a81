"""The engine, for processes that run the same one on the same decisions. Imports MLX.

| name | what for |
|---|---|
| `ChatService`, `Processes` | all that serves requests, over the processes of a group |
| `ModelCache`, `Weights`, `engine_name`, `ModelOptions` | models and their engines, unserved |
| `Engine`, `EngineWorker`, `Recorder`, `CLEAR_EVERY` | one engine, and what steps it |
| `Replica` | an engine's part: a subclass sends decisions, or gets those of another process |
| `Decision`, `Submitted`, `Ended` | decisions outside the record of a step |
| `Opening`, `Preempted`, `Cut`, `Admitted`, `CaughtUp` | decisions that come before that record |
| `Outcome` | what a token does to its row |
| `StepRecord`, `StepPlan`, `Chunk` | the record |
| `Scheduler`, `Request`, `Phase`, `Row`, `PrefillJob` | what decisions are about |
| `Inputs`, `Vectors`, `Scores` | texts of which vectors or scores are wanted |
| `RowConstraint`, `SamplingParams`, `Drawn` | how tokens are drawn |
| `EventQueue`, `Delta`, `FinishReason`, `TokenLogprob` | what readers of requests get |
| `Types`, `leaves`, `outline`, `rebuilt` | features of images, taken apart and put together |
| `memory_limit`, `device_name` | this machine |
"""

from ..engine.engine import Engine
from ..engine.execution.sampler import Drawn
from ..engine.inputs import Inputs, Scores, Vectors
from ..engine.memory import memory_limit
from ..engine.replication import Replica
from ..engine.request import Phase, PrefillJob, Request, Row, RowConstraint, SamplingParams
from ..engine.request_log import Recorder
from ..engine.scheduling.plan import Chunk, StepPlan
from ..engine.scheduling.scheduler import Scheduler
from ..engine.step.decisions import (
    Admitted,
    CaughtUp,
    Cut,
    Decision,
    Ended,
    Opening,
    Outcome,
    Preempted,
    Submitted,
)
from ..engine.step.record import StepRecord
from ..engine.worker import CLEAR_EVERY, EngineWorker
from ..protocol.event_queue import EventQueue
from ..protocol.events import Delta, FinishReason, TokenLogprob
from ..protocol.options import ModelOptions
from ..records.features import Types, leaves, outline, rebuilt
from ..serving.engine_builder import engine_name
from ..serving.model_cache import ModelCache
from ..serving.service import ChatService, device_name
from ..serving.split import Processes
from ..serving.weights import Weights

__all__ = [
    "CLEAR_EVERY",
    "Admitted",
    "CaughtUp",
    "ChatService",
    "Chunk",
    "Cut",
    "Decision",
    "Delta",
    "Drawn",
    "Ended",
    "Engine",
    "EngineWorker",
    "EventQueue",
    "FinishReason",
    "Inputs",
    "ModelCache",
    "ModelOptions",
    "Opening",
    "Outcome",
    "Phase",
    "Preempted",
    "PrefillJob",
    "Processes",
    "Recorder",
    "Replica",
    "Request",
    "Row",
    "RowConstraint",
    "SamplingParams",
    "Scheduler",
    "Scores",
    "StepPlan",
    "StepRecord",
    "Submitted",
    "TokenLogprob",
    "Types",
    "Vectors",
    "Weights",
    "device_name",
    "engine_name",
    "leaves",
    "memory_limit",
    "outline",
    "rebuilt",
]
