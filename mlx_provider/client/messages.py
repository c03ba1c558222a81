"""What a client sends to an engine and reads from it: addresses, bodies, events and errors."""

import json
from contextlib import suppress
from dataclasses import dataclass

import httpx
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from .. import __version__
from ..errors import BadRequest, EngineUnavailable, MLXProviderError, OtherProtocol, Unauthorized
from ..protocol.events import PROTOCOL_VERSION, ErrorBody
from ..protocol.health import Health, Stats
from ..protocol.requests import ModelRequest


@dataclass(frozen=True)
class Address:
    url: str
    socket: str | None = None  # the path of a unix socket, which is used in place of the URL's host

    def __str__(self) -> str:
        return f"unix:{self.socket}" if self.socket else self.url


def parse_address(api_base: str) -> Address:
    """A trailing `/v1` is ignored. Raises `BadRequest` that names the two forms."""
    with suppress(httpx.InvalidURL):
        if api_base.startswith("unix:"):
            path = api_base.removeprefix("unix:").removeprefix("//")
            if path.startswith("/"):
                return Address("http://engine", path)
        elif (url := httpx.URL(api_base)).scheme in ("http", "https") and url.host:
            return Address(api_base.rstrip("/").removesuffix("/v1").rstrip("/"))
    reason = f"api_base {api_base!r} is neither http(s)://host:port nor unix:/path/to.sock"
    raise BadRequest(reason, param="api_base")


def request_body(request: ModelRequest) -> bytes:
    try:
        return request.__pydantic_serializer__.to_json(request)  # makes no text of the body
    except (PydanticSerializationError, UnicodeEncodeError) as error:
        raise BadRequest(f"the request cannot be written as JSON: {error}") from None


class LineBuffer:
    """Joins pieces of a reply and splits it at newlines alone: JSON text may contain U+2028."""

    def __init__(self) -> None:
        self._begun: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The lines that `piece` completes, without newlines."""
        *ends, rest = piece.split(b"\n")
        if ends:
            ends[0] = b"".join([*self._begun, ends[0]])
            self._begun = []
        self._begun.append(rest)
        return ends


def error_of(status: int, path: str, body: bytes) -> MLXProviderError:
    """The engine's error in a reply, or one that quotes a reply of some other server."""
    with suppress(ValueError, KeyError, TypeError):
        return ErrorBody.model_validate(json.loads(body)["error"]).exception()
    message = f"{path} answered {status}: {body[:200]!r}"
    if status == Unauthorized.status:
        return Unauthorized(message)
    return EngineUnavailable(f"no engine of mlx-provider: {message}")


def parse_health(line: bytes) -> Health:
    """Raises `OtherProtocol`, or `EngineUnavailable` for a line that no engine sends."""
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


def parse_stats(line: bytes) -> Stats:
    try:
        return Stats.model_validate_json(line)
    except ValidationError as error:
        raise EngineUnavailable(f"the engine's stats cannot be read: {error}") from None
