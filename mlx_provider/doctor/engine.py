"""The engine process of this user, if one runs."""

from __future__ import annotations

from collections.abc import Iterator

from ..client.connection import Connections
from ..client.http import HttpClient
from ..client.runtime_folder import differences, holder, identity, is_held
from ..errors import EngineUnavailable, OtherProtocol
from ..gateway.models import size
from ..protocol.health import Health
from .findings import Finding
from .subject import Subject

RESTART = "mlx-provider engine restart (with --idle: once no request runs)"


def running(subject: Subject) -> Iterator[Finding]:
    """Whether it is healthy, and whether a new engine would be the same. Starts none."""
    connections = Connections(subject.environ)
    client = connections.client(None, None)
    if not isinstance(client, HttpClient):
        summary = "the engine is a thread of the process that uses it (MLX_PROVIDER_TRANSPORT)"
        yield Finding("engine.running", "note", summary)
        return
    try:
        yield from told_of(client.health(), subject)
    except OtherProtocol as error:
        yield Finding("engine.out_of_date", "warn", error.message, RESTART)
    except EngineUnavailable as error:
        if is_held(subject.runtime.lock):
            pid = holder(subject.runtime.lock)
            summary = f"engine process {pid} does not answer ({error.message})"
            remedy = f"see {subject.runtime.log}, end process {pid}, or wait if it is starting"
            yield Finding("engine.running", "warn", summary, remedy)
        else:
            yield Finding("engine.running", "ok", "none runs; the first request starts one")
    finally:
        connections.close()


def told_of(health: Health, subject: Subject) -> Iterator[Finding]:
    if not health.ok:
        remedy = f"{RESTART}; its log is {subject.runtime.log}"
        yield Finding("engine.running", "fail", f"the engine has died: {health.detail}", remedy)
        return
    models = ", ".join(model.model for model in health.models) or "no model"
    summary = f"process {health.pid}, mlx-provider {health.version} on {health.device}: {models}, "
    yield Finding("engine.running", "ok", summary + size(health.active_memory))
    if health.out_of_date:
        summary = f"the engine is out of date: {'; '.join(health.out_of_date)}"
        yield Finding("engine.out_of_date", "warn", summary, RESTART)
    changed = differences(health.identity, identity(subject.environ))
    if changed:
        summary = f"the engine was started with other settings: {'; '.join(changed.values())}"
        yield Finding("engine.settings", "warn", summary, RESTART)
