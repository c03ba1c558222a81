"""A process of the group is lost: requests in flight are told at once, though the service hangs."""

from __future__ import annotations

import json

import anyio
import pytest

from mlx_provider.byte_gate import ByteGate
from mlx_provider.cli.engine import described
from mlx_provider.config import EngineSettings
from mlx_provider.doctor import Subject
from mlx_provider.doctor.engine import told_of
from mlx_provider.errors import ProcessLost, RequestFailed
from mlx_provider.protocol.event_queue import EventQueue
from mlx_provider.protocol.events import Accepted, Failed
from mlx_provider.protocol.health import Health, ProcessStatus
from mlx_provider.protocol.requests import GenerateRequest
from mlx_provider.server.generate import _Answer
from mlx_provider.server.ndjson import asked
from mlx_provider.server.process_group import ProcessGroup

from .fake_engine import FakeService

SERVES = ProcessStatus(name="rank 1", host="mac-1", pid=7, device="M4", state="serving", since=1e9)
FAULT = SERVES.model_copy(update={"state": "lost", "detail": "no beat for 4 s"})
HEALTH = Health(ok=True, version="1", pid=1, device="M4", blas="")


def test_the_first_loss_counts_and_is_told_whenever_somebody_listens() -> None:
    group = ProcessGroup()
    told: list[str] = []
    group.lose(ProcessLost("first"))
    group.on_loss(lambda: told.append("late"))
    group.lose(ProcessLost("second"))
    assert told == ["late"]
    assert group.error is not None
    assert group.error.message == "first"


def test_older_clients_meet_no_new_field_where_there_are_no_groups() -> None:
    assert not {"processes", "process_fault"} & json.loads(HEALTH.model_dump_json()).keys()
    grouped = HEALTH.model_copy(update={"processes": [SERVES], "process_fault": FAULT})
    assert Health.model_validate_json(grouped.model_dump_json()) == grouped


def test_people_are_told_which_rank_and_since_when() -> None:
    health = HEALTH.model_copy(update={"processes": [SERVES, FAULT], "process_fault": FAULT})
    lines = "\n".join(described(health, []))
    assert "rank 1 on mac-1, process 7 on M4: serving since 2001-09-0" in lines
    assert "last started again for rank 1 on mac-1" in lines
    assert ": no beat for 4 s" in lines
    found = [each for each in told_of(health, Subject()) if each.name == "engine.processes"]
    assert [each.state for each in found] == ["ok", "fail", "note"]


def test_a_request_that_is_prepared_when_a_process_is_lost_is_told_so() -> None:
    lost = ProcessLost("rank 1 is lost")

    class Service(FakeService):
        def submit(self, request: GenerateRequest, queue: EventQueue) -> Accepted:
            queue.put([Failed.of(lost)])  # as the server does, which gives up
            raise RequestFailed.cancelled()  # as the service does, which finds that

    async def answer() -> None:
        service, request = Service(EngineSettings()), GenerateRequest(id="1", model="m", prompt="p")
        ticket = ByteGate(1).ask(1)
        stopping, limiter = anyio.Event(), anyio.CapacityLimiter(1)
        await _Answer(service, limiter, stopping, lambda: lost, asked(request), ticket)._accept()

    with pytest.raises(ProcessLost):
        anyio.run(answer)
