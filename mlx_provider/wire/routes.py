"""The routes of all APIs of others, and the form of their errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import MLXProviderError
from .anthropic import routes
from .body import Read
from .openai import routes as openai
from .openai import stream
from .responses import routes as responses

GENERATE: Mapping[str, Read] = {
    **openai.GENERATE,
    **responses.GENERATE,
    **routes.GENERATE,
}
ROUTES: Mapping[str, Read] = {
    **openai.ROUTES,
    **responses.ROUTES,
    **routes.ROUTES,
}
AGENTS = frozenset(GENERATE) - {"/v1/embeddings"}
"""Routes that answer with text."""
ERRORS: Mapping[str, Callable[[MLXProviderError], dict[str, Any]]] = {
    **dict.fromkeys((*openai.ROUTES, *responses.ROUTES), stream.error_body),
    **dict.fromkeys(routes.ROUTES, routes.error_body),
}
