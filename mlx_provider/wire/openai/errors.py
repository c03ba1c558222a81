"""Errors in the form of OpenAI."""

from __future__ import annotations

from typing import Any

from ...errors import MLXProviderError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
}


def error_body(error: MLXProviderError) -> dict[str, Any]:
    other = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "error": {
            "message": error.message,
            "type": TYPES.get(error.status, other),
            "param": error.param,
            "code": error.code,
        }
    }
