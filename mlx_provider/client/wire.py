"""Requests, event lines and errors as bytes over HTTP."""

from __future__ import annotations

import json

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from .. import __version__
from ..errors import (
    BadRequest,
    EngineUnavailable,
    MLXProviderError,
    OtherProtocol,
    Unauthorized,
)
from ..protocol.events import EVENT_BATCH, ErrorBody, Event
from ..protocol.figures import Figures
from ..protocol.health import Health
from ..protocol.requests import ModelRequest
from ..protocol.wire_model import PROTOCOL_VERSION


def request_body(request: ModelRequest) -> bytes:
    """Raises `BadRequest` if JSON cannot represent it."""
    try:
        return request.__pydantic_serializer__.to_json(request)  # no text beside the bytes
    except (PydanticSerializationError, UnicodeEncodeError) as error:
        raise BadRequest(f"the request cannot be written as JSON: {error}") from None


class EventLines:
    """Splits at newlines only: U+2028 and U+0085 are ordinary characters inside JSON text."""

    def __init__(self) -> None:
        self._begun: list[bytes] = []

    def feed(self, piece: bytes) -> list[Event]:
        """Events whose lines end in this piece. Raises pydantic's `ValidationError`."""
        *ends, rest = piece.split(b"\n")
        if ends:
            ends[0] = b"".join([*self._begun, ends[0]])
            self._begun = []
        self._begun.append(rest)
        return [event for line in ends for event in EVENT_BATCH.validate_json(line)]


def error_of(status: int, path: str, body: bytes) -> MLXProviderError:
    try:
        return ErrorBody.model_validate(json.loads(body)["error"]).exception()
    except (ValueError, KeyError, TypeError):
        message = f"{path} answered {status}: {body[:200]!r}"
    if status == Unauthorized.status:
        return Unauthorized(message)
    return EngineUnavailable(f"no engine of mlx-provider: {message}")


def parse_health(line: bytes) -> Health:
    """Raises `EngineUnavailable` for another protocol."""
    try:
        fields = json.loads(line)
        theirs = int(fields["protocol"])
        version, pid = str(fields["version"]), int(fields["pid"])
    except (ValueError, KeyError, TypeError):
        raise EngineUnavailable(f"no engine of mlx-provider: it sent {line[:200]!r}") from None
    if theirs != PROTOCOL_VERSION:
        raise OtherProtocol(
            f"the engine is mlx-provider {version} (protocol {theirs}), this client is "
            f"{__version__} (protocol {PROTOCOL_VERSION}): end engine process {pid} "
            "so that one of this version starts, or install the same version on both sides"
        )
    try:
        return Health.model_validate(fields)
    except ValidationError as error:
        raise EngineUnavailable(f"the engine's state cannot be read: {error}") from None


def parse_figures(line: bytes) -> Figures:
    """Raises `EngineUnavailable` if it has no figures."""
    try:
        return Figures.model_validate_json(line)
    except ValidationError as error:
        raise EngineUnavailable(f"the engine's figures cannot be read: {error}") from None
