"""What an engine decides beside the record of a step, as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import MLXProviderError
from ...protocol.events import Event, FinishReason
from ..request import PrefillJob, Request, Row


@dataclass(frozen=True)
class Submitted:
    """A request is queued."""

    request: Request


@dataclass(frozen=True)
class Ended:
    """A request ends before its rows do: by its client, its deadline, or a failure."""

    request: Request


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a token does to its row."""

    events: Sequence[Event] = ()
    """For the reader: what the token adds to the text, and the end of the row."""
    reason: FinishReason | None = None
    """Why the row ends; `None`: it goes on."""
    error: MLXProviderError | None = None
    """With which the request fails."""


GOES_ON = Outcome()
"""Of a token that adds nothing to show yet."""


@dataclass(frozen=True)
class Cut:
    """A row ends for want of memory."""

    row: Row
    outcome: Outcome


@dataclass(frozen=True)
class Preempted:
    """A row gives up its place in memory, and waits."""

    row: Row


@dataclass(frozen=True)
class Admitted:
    """Memory is set aside for a prompt."""

    job: PrefillJob


@dataclass(frozen=True)
class CaughtUp:
    """The tokens of the last pass are read before the next one is decided."""


Opening = Cut | Preempted | Admitted | CaughtUp
Decision = Submitted | Ended | Opening
