"""APIs of other servers: their requests as ours, and our events as their replies. This module has
the routes of all, and the form of their errors."""

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import MLXProviderError
from .anthropic import routes as anthropic
from .api import Read
from .openai import routes as openai
from .openai.answer import error_body
from .responses import routes as responses

# By path, how a body is read. `GENERATE`: routes that run a model; `ROUTES`: also those that count.
GENERATE: Mapping[str, Read] = {**openai.GENERATE, **responses.GENERATE, **anthropic.GENERATE}
ROUTES: Mapping[str, Read] = {**openai.ROUTES, **responses.ROUTES, **anthropic.ROUTES}
AGENTS = frozenset(GENERATE) - {"/v1/embeddings"}  # routes that answer with text
ERRORS: Mapping[str, Callable[[MLXProviderError], dict[str, Any]]] = {
    **dict.fromkeys(ROUTES, error_body),
    **dict.fromkeys(anthropic.ROUTES, anthropic.error_body),
}
"""By path: the form of an error's body."""
