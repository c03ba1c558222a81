"""An engine in another process, over a unix socket or TCP."""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import httpx

from .. import __version__
from ..config import PREFIX
from ..errors import EngineUnavailable, OtherProtocol
from ..protocol.figures import Figures
from ..protocol.health import Health
from ..protocol.requests import STARTS_ENGINES, GenerateRequest, ModelRequest
from .address import Address
from .control_connection import Attachment, ControlConnection
from .generation import Generation
from .identity import OWN, PYTHON, differences, is_left_behind, told
from .retry import NotTaken, last_try, patiently
from .stream_connection import Endpoint
from .wire import parse_figures, parse_health, request_body

T = TypeVar("T")

log = logging.getLogger(__name__)

LEFT_BEHIND = "start this process again, it is of a version that is installed no more"
LATER = "it ends when it is idle, or with `mlx-provider engine restart`"
APART = f"{PREFIX}RUNTIME_DIR gives each its own engine"

When = Literal["now", "idle", "alone"]
"""`idle`: no request runs; `alone`: and no other client is there."""


class HttpClient:
    """`EngineClient` over HTTP. One thread watches the connection that shows both sides alive.

    Safe from any thread and across `fork`: a child opens connections of its own. Only
    `submit`, `health` and their like block; reading a `Generation` in an event loop does not.
    """

    def __init__(
        self,
        address: Address,
        api_key: str | None = None,
        start: Callable[[], None] | None = None,
        identity: Callable[[], Mapping[str, str]] | None = None,
    ) -> None:
        """`start` makes sure that an engine listens; `None`: the engine is somebody else's.

        `identity`: what an engine started now would be; one that is something else gives way.
        `None`: only another version of this package does.
        """
        self._identity = identity
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        headers |= dict([STARTS_ENGINES]) if start else {}
        # Loading the certificate store takes 20 ms, which only https needs.
        tls = httpx.create_ssl_context() if address.url.startswith("https:") else None
        self._endpoint = Endpoint(address, headers, tls)
        self._start = start
        self._control = ControlConnection(self._endpoint)
        forked = weakref.WeakMethod(self._forked)
        os.register_at_fork(after_in_child=lambda: (method := forked()) and method())

    def submit(self, request: ModelRequest) -> Generation:
        """Send the request and block until it is accepted.

        Raises the engine's typed error, `EngineUnavailable` where no engine can be reached
        or started, `EngineDied` where it ended meanwhile.
        """
        body = request_body(request)
        return patiently(lambda: self._sent(lambda control: control.send(request.path, body)))

    def count(self, request: GenerateRequest) -> int:
        """Tokens of its prompt. Blocks and raises as `submit`."""
        body = request_body(request)
        reply = patiently(
            lambda: self._sent(lambda control: control.ask("POST", "/v1/count", body=body))
        )
        return int(json.loads(reply)["prompt_tokens"])

    def health(self) -> Health:
        """State of the engine; starts none. Raises `EngineUnavailable`."""
        return parse_health(self._ask("GET", "/health", ok=(200, 503)))

    def metrics(self) -> bytes:
        """Prometheus text exposition; starts no engine."""
        return self._ask("GET", "/metrics")

    def figures(self) -> Figures:
        """What the engine does now; starts none."""
        return parse_figures(self._ask("GET", "/v1/figures"))

    def watch(self, every: float) -> Iterator[bytes]:
        """The same as a line of JSON every so many seconds, until the engine ends; starts none.

        Reading raises typed errors, `EngineDied` where it is cut off; see `wire.parse_figures`.
        """
        return self._control.lines(f"/v1/figures?stream={every:g}")

    def cache_report(self) -> dict[str, Any]:
        """Prefix cache of each model; starts no engine."""
        report: dict[str, Any] = json.loads(self._ask("GET", "/cache"))
        return report

    def cache_clear(self) -> None:
        """Empty every prefix cache; starts no engine."""
        self._ask("DELETE", "/cache")

    def stop(self, reason: str, when: When) -> bool:
        """Ask the engine to end; whether it does so at once.

        Starts no engine. Raises `EngineUnavailable` where none runs.
        """
        self.health()
        return _gives_way(self._control, reason, when)

    def close(self) -> None:
        """Cancel what runs and close the connections; a later call opens new ones."""
        control, self._control = self._control, ControlConnection(self._endpoint)
        control.close()

    def _sent(self, send: Callable[[ControlConnection], T]) -> T:
        control = self._control
        attachment = self._attached(control)
        try:
            return send(control)
        except NotTaken:
            attachment.end()
            raise

    def _attached(self, control: ControlConnection) -> Attachment:
        with control.attaching:
            if control.attachment is not None and not control.attachment.gone.is_set():
                return control.attachment
            if self._start is None:
                return last_try(control.attach)
            try:
                attachment = control.attach()
            except NotTaken:
                return self._started(control, self._start)
            except OtherProtocol as error:
                if is_left_behind() or not _gives_way(control, error.message, "idle"):
                    raise
                return self._started(control, self._start)
            return self._up_to_date(control, attachment, self._start)

    def _started(
        self, control: ControlConnection, start: Callable[[], None], ending: int | None = None
    ) -> Attachment:
        """A new engine. `ending`: the process that gives way, which listens a moment longer."""

        def attached() -> Attachment:
            start()
            try:
                attachment = control.attach()
            except OtherProtocol as error:
                raise NotTaken(error) from None
            if attachment.health.pid == ending:
                attachment.end()
                raise NotTaken(EngineUnavailable(f"engine process {ending} does not end"))
            return attachment

        attachment = patiently(attached)
        if attachment.health.version != __version__:
            raise _other_version(attachment, LEFT_BEHIND)
        return attachment

    def _up_to_date(
        self, control: ControlConnection, attachment: Attachment, start: Callable[[], None]
    ) -> Attachment:
        """The engine, or a new one in the place of one that is out of date and disturbs nobody.

        Raises `EngineUnavailable` where one of another version goes on.
        """
        health = attachment.health
        changed = differences(health.identity, self._identity()) if self._identity else {}
        if health.version != __version__:
            changed = {OWN: f"{OWN}: {health.version}, here {__version__}"} | changed
        if not changed:
            return attachment
        if OWN in changed and is_left_behind():
            raise _other_version(attachment, LEFT_BEHIND)
        # Another Python, or other settings, may be wanted by others as much as ours are by us.
        newer = OWN in changed and PYTHON not in changed
        if _gives_way(control, told(changed), "idle" if newer else "alone"):
            attachment.end()
            return self._started(control, start, health.pid)
        if OWN in changed:
            raise _other_version(attachment, LATER if newer else APART)
        log.warning(
            "the running engine (process %d) was started with other settings, which other clients "
            "use: it serves this process, too, until these are gone, or until `mlx-provider engine "
            "restart`. %s: %s", health.pid, APART, told(changed),
        )  # fmt: skip
        return attachment

    def _ask(self, method: str, path: str, ok: tuple[int, ...] = (200,)) -> bytes:
        return last_try(lambda: self._control.ask(method, path, ok))

    def _forked(self) -> None:
        self._control = ControlConnection(self._endpoint)


def _other_version(attachment: Attachment, remedy: str) -> EngineUnavailable:
    attachment.end()
    health = attachment.health
    return EngineUnavailable(
        f"the running engine (process {health.pid}) is mlx-provider {health.version}, this client "
        f"is {__version__}: {remedy}"
    )


def _gives_way(control: ControlConnection, reason: str, when: When) -> bool:
    """Ask the engine to end; whether it does so at once."""
    body = json.dumps({"reason": reason[:10_000], "when": when}).encode()
    try:
        return bool(json.loads(control.ask("POST", "/v1/stop", body=body))["ends"])
    except (NotTaken, EngineUnavailable):  # it is gone, or of a version that cannot be asked
        return False
