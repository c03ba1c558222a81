"""Replaces the engine with a newer one without interrupting a request, on `POST /v1/stop` or when
its plugins have changed on disk: it refuses a request, and the client sends it to the engine that
it then starts."""

import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from ..config import installed_version
from ..errors import BadRequest, EngineUnavailable, MLXProviderError
from ..protocol.event_queue import EventQueue
from ..protocol.events import Failed
from ..protocol.requests import STARTS_ENGINES
from ..registry import Plugin
from ..registry.discovery import installed, selection, times
from .access import error_response

UNREAD_TOTAL = 2**29
"""Bytes of unread replies of all requests."""
OWN = "mlx-provider"
PACKAGES = (OWN, "mlx", "mlx-lm", "mlx-vlm", "transformers")
LISTED = 5
log = logging.getLogger(__name__)
STARTS = tuple(each.encode() for each in STARTS_ENGINES)
NEXT = "it is replaced at the next request, if no other request runs"
REMOTE = "it continues unchanged until its operator restarts it"
OTHERS = "it is replaced at the first request of a client of the new version"


class Activity:
    """Used only in the event loop."""

    def __init__(self) -> None:
        self.clients = 0
        self._open: dict[EventQueue, str] = {}
        self._since = time.monotonic()

    @contextmanager
    def attach(self) -> Iterator[None]:
        self.clients += 1
        try:
            yield
        finally:
            self.clients -= 1
            self._since = time.monotonic()

    @contextmanager
    def serving(self, queue: EventQueue, owner: str = "") -> Iterator[None]:
        self._open[queue] = owner
        try:
            yield
        finally:
            self._open.pop(queue, None)
            self._since = time.monotonic()

    @property
    def requests(self) -> int:
        return len(self._open)

    def idle(self) -> float:
        return 0.0 if self.clients or self.requests else time.monotonic() - self._since

    def relieve(self) -> None:
        """If readers leave too much unread, end the slowest reply of the owner with the most."""
        unread = Counter[str]()
        for queue, owner in self._open.items():
            unread[owner] += queue.unread
        slowest = sorted(self._open, key=lambda queue: queue.unread)
        while unread.total() > UNREAD_TOTAL:
            [(most, _)] = unread.most_common(1)
            queue = next(each for each in reversed(slowest) if self._open[each] == most)
            slowest.remove(queue)
            unread[most] -= queue.unread
            queue.give_up()

    def fail_open(self, error: MLXProviderError) -> None:
        for queue in self._open:
            queue.put([Failed.of(error)])


class OutOfDate:
    """Created before the plugins are imported. Used in the event loop: a check costs a `stat` of
    each watched file and import folder."""

    def __init__(self) -> None:
        self._folders = _folders()
        self._began = self._now = _versions({})
        self._sources = [(plugin, point, times(point)) for plugin, point in _third_party()]

    def changes(self) -> list[str]:
        """Empty if a new engine would be the same."""
        if (folders := _folders()) != self._folders:
            self._folders, self._now = folders, _versions(self._began)
        then, now = self._began, self._now
        found = [
            f"{name}: {then.get(name, 'none')}, now {now.get(name, 'none')}"
            for name in sorted({*then, *now})
            if then.get(name) != now.get(name)
        ]
        for plugin, point, before in self._sources:
            if edited := sorted({path for path, _ in times(point).items() ^ before.items()}):
                # names without folders, which only the owner may see
                names = [f"{Path(path).parent.name}/{Path(path).name}" for path in edited]
                more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
                found.append(f"plugin {plugin.name}: edited {', '.join(names[:LISTED])}{more}")
        return found

    def replaceable(self, changes: list[str]) -> bool:
        """Whether a new engine could serve the present clients. Not one of another version: the
        clients have this version until they restart."""
        return bool(changes) and self._now.get(OWN) == self._began.get(OWN)


def _third_party() -> list[tuple[Plugin, EntryPoint]]:
    wanted = selection(os.environ)
    return [
        (plugin, point)
        for plugin, point in installed()
        if not plugin.ours and (wanted is None or plugin.name in wanted)
    ]


def _versions(before: Mapping[str, str]) -> dict[str, str]:
    """`before`: of packages that pip is replacing."""
    found = {name: installed_version(name) or before.get(name, "") for name in PACKAGES}
    for plugin, _ in _third_party():
        found[f"plugin {plugin.name}"] = f"{plugin.distribution} {plugin.version}"
    return {name: number for name, number in found.items() if number}


def _folders() -> dict[str, int]:
    found = {}
    for path in sys.path:
        with suppress(OSError):
            found[path] = os.stat(path).st_mtime_ns  # noqa: PTH116 - for each request
    return found


class StopRequest(BaseModel):
    """When to end: at once, without requests, or also without other clients."""

    model_config = ConfigDict(extra="forbid")
    reason: str = Field(max_length=10_000)
    when: Literal["now", "idle", "alone"]


class Handover:
    def __init__(
        self, activity: Activity, out_of_date: OutOfDate | None = None, *, remote: bool = False
    ) -> None:
        """`remote`: clients on other machines cannot start an engine."""
        self._activity = activity
        self._out_of_date = out_of_date
        self._remote = remote
        self._requested: set[str] = set()
        self._noticed: list[str] = []
        self.ending = False
        self.stop: Callable[[], None] = lambda: None
        """The server sets this to end the process."""

    async def __call__(self, request: Request) -> Response:
        """`{"ends": bool, "clients": int, "requests": int}`."""
        try:
            body = StopRequest.model_validate_json(await request.body())
        except ValidationError as error:
            return error_response(BadRequest(f"body: {error.errors()[0]['msg']}"))
        self._requested.add(body.when)
        ends = self.due(others=1)
        counts = {"clients": self._activity.clients, "requests": self._activity.requests}
        if ends:
            self._end()
        level, when = (logging.INFO, "") if ends else (logging.WARNING, " when it is idle")
        log.log(level, "the engine ends%s (%s): %s", when, body.reason, counts)
        return JSONResponse({"ends": ends, **counts})

    def admit(self, scope: Scope) -> None:
        """Raises `EngineUnavailable` if this engine is ending, or is out of date and the client can
        start another."""
        if not self.ending:
            changes: list[str] = []
            if STARTS in scope["headers"] and (changes := self._changes()) != self._noticed:
                self._noticed = changes
                if changes and self._activity.requests:
                    listed = "; ".join(changes)
                    log.warning("the engine is out of date: %s: %s", listed, self._outlook(changes))
            if not self._renews(changes) or self._activity.requests:
                return
            log.info("a new engine replaces this one: %s", "; ".join(changes))
            self._end()
        raise EngineUnavailable("a new engine replaces this one")

    def out_of_date(self) -> list[str]:
        changes = self._changes()
        return [*changes, self._outlook(changes)] if changes else []

    def due(self, others: int = 0) -> bool:
        """`others`: clients that do not prevent the end."""
        if "now" in self._requested or self._activity.requests:
            return "now" in self._requested
        alone = "alone" in self._requested and self._activity.clients <= others
        renews = bool(self._noticed) and self._renews(self._changes())
        return alone or "idle" in self._requested or renews

    def _changes(self) -> list[str]:
        return [] if self._out_of_date is None else self._out_of_date.changes()

    def _renews(self, changes: list[str]) -> bool:
        known = None if self._remote else self._out_of_date
        return known is not None and known.replaceable(changes)

    def _outlook(self, changes: list[str]) -> str:
        return REMOTE if self._remote else NEXT if self._renews(changes) else OTHERS

    def _end(self) -> None:
        self.ending = True
        self.stop()
