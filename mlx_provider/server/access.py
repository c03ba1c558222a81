"""Who may talk to the engine over TCP."""

from __future__ import annotations

import hmac

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import MLXProviderError, Unauthorized
from ..protocol import ErrorBody

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[")
"""`Host` names to accept without a key (`[`: an IPv6 literal, which no DNS name begins with):
a web page whose own name was rebound to loopback cannot reach the engine."""


class BearerKey:
    """ASGI middleware: answers 401 to HTTP requests without the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may_enter(scope):
            refused = Unauthorized("the engine's key is missing or wrong: set api_key")
            await error_response(refused)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _may_enter(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self._expected)


def error_response(error: MLXProviderError, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error before the first event: its HTTP status and `{"error": ErrorBody}`."""
    return JSONResponse(
        {"error": ErrorBody.of(error).model_dump()}, status_code=error.status, headers=headers
    )
