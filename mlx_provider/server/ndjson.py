"""Our own requests and events: the protocol of our clients."""

from __future__ import annotations

from collections.abc import Sequence

from ..protocol.events import EVENT_BATCH, Accepted, Event
from ..protocol.requests import ModelRequest
from ..wire.asked import Asked

NDJSON = "application/x-ndjson"


class Lines:
    """One line per wake-up of the reader. See `asked.Reply`."""

    media_type = NDJSON
    heartbeat = b""
    streamed = True

    def feed(self, events: Sequence[Event]) -> bytes:
        return EVENT_BATCH.dump_json(list(events)) + b"\n"


def asked(request: ModelRequest) -> Asked:
    return Asked([request], _lines, joined=False)


def _lines(accepted: Accepted) -> Lines:
    return Lines()
