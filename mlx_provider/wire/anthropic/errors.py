"""Errors in the form of Anthropic."""

from __future__ import annotations

from typing import Any

from ...errors import MLXProviderError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def error_body(error: MLXProviderError) -> dict[str, Any]:
    """A prompt that is too long has Anthropic's words already, by which clients know it."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = TYPES.get(error.status, other)
    shown = {"type": kind, "message": error.message, "details": {"error_code": error.code}}
    return {"type": "error", "error": shown, "request_id": None}
