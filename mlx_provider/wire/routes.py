"""The routes of all APIs of other servers, and the form of their errors."""

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import MLXProviderError
from .anthropic import routes as anthropic
from .api import Read
from .openai import routes as openai
from .openai.answer import error_body
from .responses import routes as responses

GENERATE: Mapping[str, Read] = {**openai.GENERATE, **responses.GENERATE, **anthropic.GENERATE}
ROUTES: Mapping[str, Read] = {**openai.ROUTES, **responses.ROUTES, **anthropic.ROUTES}
AGENTS = frozenset(GENERATE) - {"/v1/embeddings"}
"""Routes that answer with text."""
ERRORS: Mapping[str, Callable[[MLXProviderError], dict[str, Any]]] = {
    **dict.fromkeys(ROUTES, error_body),
    **dict.fromkeys(anthropic.ROUTES, anthropic.error_body),
}
