"""Errors in the form of Anthropic."""

from __future__ import annotations

from typing import Any

from ...errors import MLXProviderError
from ..openai import errors

TYPES = {**errors.TYPES, 404: "not_found_error", 413: "request_too_large"}


def error_body(error: MLXProviderError) -> dict[str, Any]:
    """Clients know a prompt that is too long by Anthropic's words, which the error has already."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = TYPES.get(error.status, other)
    shown = {"type": kind, "message": error.message, "details": {"error_code": error.code}}
    return {"type": "error", "error": shown, "request_id": None}
