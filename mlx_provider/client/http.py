"""A client of an engine in another process, over a unix socket or TCP. `submit` and `count` connect
first and, if necessary, start the local engine or replace an outdated one."""

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from .. import __version__
from ..config import PREFIX
from ..errors import BadRequest, EngineDied, EngineUnavailable, OtherProtocol
from ..protocol.health import Health, Stats
from ..protocol.requests import GenerateRequest, ModelRequest
from .generation import Generation
from .messages import Address, parse_health, parse_stats, request_body
from .runtime_folder import OWN, PYTHON, differences, is_outdated
from .transport import Stream, Transport, mark_unaccepted, retry

T = TypeVar("T")

log = logging.getLogger(__name__)

RESTART_THIS = "restart this process: its version is no longer installed"
RESTART_ENGINE = "it ends when it is idle, or with `mlx-provider engine restart`"
OWN_ENGINE = f"{PREFIX}RUNTIME_DIR gives each its own engine"

When = Literal["now", "idle", "alone"]
"""When an engine ends: `now`, and its requests fail; `idle`: when no request runs; `alone`: when,
in addition, no other client is connected."""


class HttpClient(Transport):
    """An engine, over HTTP. Methods raise the engine's typed error, or `EngineUnavailable`, and
    block; reading a `Generation` in an event loop does not."""

    def __init__(
        self,
        address: Address,
        api_key: str | None = None,
        start: Callable[[], None] | None = None,
        identity: Callable[[], Mapping[str, str]] | None = None,
    ) -> None:
        """`start` returns once an engine listens. `None`: this client starts and replaces none.
        `identity`: of an engine that this process would start; one with another identity is
        replaced once no other client uses it. `None`: only the version of this package counts.
        Raises `BadRequest` for a key that no header can have."""
        if api_key and not api_key.isascii():
            raise BadRequest("the key has characters beyond ASCII", param="api_key")
        super().__init__(address, {"authorization": f"Bearer {api_key}"} if api_key else {})
        self._start_engine, self._identity = start, identity

    def submit(self, request: ModelRequest) -> Generation:
        """Wait until the request is accepted; loading a model may take minutes. Raises also
        `EngineDied` if the engine ended in the meantime."""
        body = request_body(request)
        return self._send_attached(lambda: self.send(request.path, body))

    def count(self, request: GenerateRequest) -> int:
        """Prompt tokens of `submit`; a lower limit if the context is exceeded. Blocks like it."""
        body = request_body(request)
        reply = self._send_attached(lambda: self.ask("POST", "/v1/count", body=body, seconds=None))
        return int(json.loads(reply)["prompt_tokens"])

    def health(self) -> Health:
        """The state of the engine, also of one whose `ok` is false."""
        return parse_health(self.ask("GET", "/health", ok=(200, 503)))

    def metrics(self) -> bytes:
        return self.ask("GET", "/metrics")

    def stats(self) -> Stats:
        return parse_stats(self.ask("GET", "/v1/stats"))

    def cache_report(self) -> Any:
        return json.loads(self.ask("GET", "/cache", seconds=None))

    def cache_clear(self) -> None:
        self.ask("DELETE", "/cache", seconds=None)

    def open_listener(self, request: Mapping[str, Any]) -> tuple[str, Stream]:
        """Let the engine open a port. Returns its URL, and the connection that keeps the port open.
        `request`: fields of `server.agent_listener.ListenerRequest`. Starts no engine."""
        url, stream = self.hold("POST", "/v1/listener", json.dumps(request).encode())
        if not url:
            raise EngineDied("the engine ended before it opened a port")
        return url.decode(), stream

    def _send_attached(self, send: Callable[[], T]) -> T:
        """Attach (open the connection that lasts), then `send`. Both are tried again a few times if
        no engine can have accepted the request."""

        def send_once() -> T:
            attachment = self._attach()
            try:
                return send()
            except EngineUnavailable as error:
                if not error.maybe_accepted:
                    attachment.close()
                raise

        return retry(send_once)

    def _attach(self) -> Stream:
        """The present attachment, or one to an engine that one thread starts or replaces."""
        with self.attaching:
            former = self.attachment
            if former is not None and former in self._threads and not former.close_error:
                return former
            managed = self._start_engine is not None
            try:
                attachment = self.attach()
            except OtherProtocol as error:
                if not managed or is_outdated() or not self.stop(error.message, "idle"):
                    raise
            except EngineUnavailable as error:
                # without an engine to start, a second attempt would only repeat this error
                error.maybe_accepted = error.maybe_accepted or not managed
                if error.maybe_accepted:
                    raise
            else:
                return self._up_to_date(attachment) if managed else attachment
            return self._start_and_attach()

    def _start_and_attach(self, ending: int | None = None) -> Stream:
        """`ending`: the process that is replaced, which may listen a little longer."""

        def start() -> Stream:
            if self._start_engine is not None:
                self._start_engine()
            try:
                attachment = self.attach()
            except OtherProtocol as error:
                raise mark_unaccepted(error) from None
            if attachment.health.pid == ending:
                attachment.close()
                raise mark_unaccepted(EngineUnavailable(f"engine process {ending} does not end"))
            return attachment

        attachment = retry(start)
        if attachment.health.version != __version__:
            raise _other_version(attachment, RESTART_THIS if is_outdated() else OWN_ENGINE)
        return attachment

    def _up_to_date(self, attachment: Stream) -> Stream:
        """The attachment, or one to a new engine, if the present one is out of date and may end.
        Raises `EngineUnavailable` if an engine of another version continues."""
        health = attachment.health
        changed = differences(health.identity, self._identity()) if self._identity else {}
        if health.version != __version__:
            changed = {OWN: f"{OWN}: {health.version}, here {__version__}"} | changed
        if not changed:
            return attachment
        if OWN in changed and is_outdated():
            raise _other_version(attachment, RESTART_THIS)
        summary = "; ".join(changed.values())
        # with another Python or other settings, other clients may need the engine as it is
        same_python = OWN in changed and PYTHON not in changed
        if self.stop(summary, "idle" if same_python else "alone"):
            attachment.close()
            return self._start_and_attach(health.pid)
        if OWN in changed:
            raise _other_version(attachment, RESTART_ENGINE if same_python else OWN_ENGINE)
        log.warning(
            "the running engine (process %d) was started with other settings or plugins, and other "
            "clients use it: it serves this process, too, until these are gone, or until "
            "`mlx-provider engine restart`. %s: %s", health.pid, OWN_ENGINE, summary,
        )  # fmt: skip
        return attachment

    def stop(self, reason: str, when: When) -> bool | None:
        """Ask the engine to end, for a `reason` in its log. Returns whether it ends at once; if
        not, it ends as `when` says. `None`: no answer. Starts none."""
        body = json.dumps({"reason": reason[:10_000], "when": when}).encode()
        try:
            return bool(json.loads(self.ask("POST", "/v1/stop", body=body))["ends"])
        except EngineUnavailable as error:  # it has ended, or its version lacks the request
            log.debug("no engine was asked to end: %s", error.message)
            return None


def _other_version(attachment: Stream, remedy: str) -> EngineUnavailable:
    attachment.close()
    health = attachment.health
    return EngineUnavailable(
        f"the running engine (process {health.pid}) is mlx-provider {health.version}, this client "
        f"is {__version__}: {remedy}"
    )
