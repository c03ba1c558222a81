"""An engine in another process, over a unix socket or TCP."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from .. import __version__
from ..errors import EngineUnavailable
from ..protocol import GenerateRequest, Health
from .address import Address
from .generation import Generation
from .link import Attachment, Link, NotTaken
from .wire import parse_health, request_body

T = TypeVar("T")


class HttpClient:
    """`EngineClient` over HTTP. One background thread per process owns the connections.

    Safe from any thread and across `fork`: a child opens connections of its own. Only
    `submit`, `health` and their like block; reading a `Generation` in an event loop does not.
    """

    def __init__(
        self,
        address: Address,
        api_key: str | None = None,
        start: Callable[[], None] | None = None,
    ) -> None:
        """`start` makes sure that an engine listens; `None`: the engine is somebody else's."""
        self._address = address
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._start = start
        self._link = Link(address, self._headers)
        self._of_parents: list[Link] = []
        forked = weakref.WeakMethod(self._forked)
        os.register_at_fork(after_in_child=lambda: (method := forked()) and method())

    def submit(self, request: GenerateRequest) -> Generation:
        """Send the request and block until it is accepted.

        Raises the engine's typed error, `EngineUnavailable` where no engine can be reached
        or started, `EngineDied` where it ended meanwhile.
        """
        body = request_body(request)
        try:
            return self._submit(body)
        except NotTaken:
            # A second time: the first found an engine that was just ending.
            return _last_try(lambda: self._submit(body))

    def health(self) -> Health:
        """State of the engine; starts none. Raises `EngineUnavailable`."""
        return parse_health(self._ask("GET", "/health", ok=(200, 503)))

    def metrics(self) -> bytes:
        """Prometheus text exposition; starts no engine."""
        return self._ask("GET", "/metrics")

    def cache_report(self) -> dict[str, Any]:
        """Prefix store of each model; starts no engine."""
        report: dict[str, Any] = json.loads(self._ask("GET", "/cache"))
        return report

    def cache_clear(self) -> None:
        """Empty every prefix store; starts no engine."""
        self._ask("DELETE", "/cache")

    def close(self) -> None:
        """Cancel what runs and close the connections; a later call opens new ones."""
        link, self._link = self._link, Link(self._address, self._headers)
        link.close()

    def _submit(self, body: bytes) -> Generation:
        link = self._link
        attachment = self._attached(link)
        try:
            return link.generate(body)
        except NotTaken:
            link.drop(attachment)
            raise

    def _attached(self, link: Link) -> Attachment:
        with link.attaching:
            if link.attachment is not None and not link.attachment.gone.is_set():
                return link.attachment
            if self._start is None:
                return _last_try(link.attach)
            try:
                attachment = link.attach()
            except NotTaken:
                self._start()
                attachment = link.attach()
            return _of_this_version(link, attachment)

    def _ask(self, method: str, path: str, ok: tuple[int, ...] = (200,)) -> bytes:
        return _last_try(lambda: self._link.ask(method, path, ok))

    def _forked(self) -> None:
        # Kept and never closed: the parent still uses these sockets and their epoll set.
        self._of_parents.append(self._link)
        self._link = Link(self._address, self._headers)


def _last_try(work: Callable[[], T]) -> T:
    """The last try: what was not taken now is an error."""
    try:
        return work()
    except NotTaken as lost:
        raise lost.error from None


def _of_this_version(link: Link, attachment: Attachment) -> Attachment:
    """Refuse an engine that outlived an upgrade of this package."""
    health = attachment.health
    if health.version == __version__:
        return attachment
    link.drop(attachment)
    raise EngineUnavailable(
        f"the running engine is mlx-provider {health.version}, this client is {__version__}: "
        f"end engine process {health.pid} (`kill {health.pid}`), the next request starts a new one"
    )
