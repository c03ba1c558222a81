"""Decisions of an engine outside the record of a step, as values."""

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
    """A request ends before its rows: by its client, its deadline, or a failure."""

    request: Request


@dataclass(frozen=True, slots=True)
class Outcome:
    """The effect of a token on its row."""

    events: Sequence[Event] = ()
    """Events for the reader: the new text, and the end of the row."""
    reason: FinishReason | None = None
    """Why the row ends. `None`: it continues."""
    error: MLXProviderError | None = None
    """The error that ends the request."""


GOES_ON = Outcome()
"""The outcome of a token that adds no visible text yet."""


@dataclass(frozen=True)
class Cut:
    """A row ends because memory is full."""

    row: Row
    outcome: Outcome


@dataclass(frozen=True)
class Preempted:
    """A row frees its memory and waits."""

    row: Row


@dataclass(frozen=True)
class Admitted:
    """Memory is reserved for a prompt."""

    job: PrefillJob


@dataclass(frozen=True)
class CaughtUp:
    """The tokens of the last pass are read before the next one is decided."""


Opening = Cut | Preempted | Admitted | CaughtUp
Decision = Submitted | Ended | Opening
