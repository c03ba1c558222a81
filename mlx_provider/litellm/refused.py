"""The error for a full context, in the form that clients of the proxy recognise. LiteLLM's proxy
answers with `code: "400"` (1.106.2 and 1.109.1, `ProxyException.to_dict`). It accepts an exception
of a callback if it is an `HTTPException`, and raises it unchanged if it is a `ProxyException`."""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException
from litellm.exceptions import ContextWindowExceededError
from litellm.proxy._types import ProxyException

from ..errors import ContextTooLong


class _Plain(HTTPException):
    """Fixed status: the next class in the MRO passes only the message."""

    def __init__(self, *args: object) -> None:
        Exception.__init__(self, *args)
        self.status_code = ContextTooLong.status
        self.detail = str(args[0])


class ContextFull(ProxyException, _Plain):
    def __init__(self, error: ContextWindowExceededError) -> None:
        super().__init__(  # type: ignore[call-arg]  # LiteLLM's, which has no types
            message=error.message,
            type="invalid_request_error",
            param="messages",
            code=ContextTooLong.status,
        )
        self.body = error.body
        """Streams of responses look for the code here."""

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "code": ContextTooLong.code}
