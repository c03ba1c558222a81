"""Errors in the form of OpenAI."""

from __future__ import annotations

from typing import Any

from ...errors import ContextTooLong, MLXProviderError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
CONTEXT = "This model's maximum context length is exceeded: "
"""By these words LiteLLM knows a `ContextWindowExceededError` (1.106.2,
`is_error_str_context_window_exceeded`)."""


def error_body(error: MLXProviderError) -> dict[str, Any]:
    other = "invalid_request_error" if error.status < 500 else "server_error"
    words = CONTEXT if isinstance(error, ContextTooLong) else ""
    return {
        "error": {
            "message": words + error.message,
            "type": TYPES.get(error.status, other),
            "param": error.param,
            "code": error.code,
        }
    }
