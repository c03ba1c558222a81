"""The answer to a request with a wrong key, or without one, from a proxy without a database.
LiteLLM looks for the key in its database, and for the reason of a failure in a package that only
databases need: 400 or 500 and a traceback per request (1.106.2, `auth_exception_handler.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

REMEDY = (
    "send the proxy's key as `Authorization: Bearer KEY` or `x-api-key: KEY`. `mlx-provider up` "
    "prints it; for `mlx-provider init` it is LITELLM_MASTER_KEY in .env"
)


def refuse_key(proxy: Any, original: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """Raises LiteLLM's error for the client. Grants nothing that `original` would not grant."""
    from fastapi import HTTPException
    from litellm import BudgetExceededError
    from litellm.proxy._types import ProxyErrorTypes, ProxyException

    error = given.get("e")
    named = isinstance(error, ProxyException | HTTPException | BudgetExceededError)
    kind = getattr(error, "type", None)
    unknown = kind == ProxyErrorTypes.no_db_connection
    missing = not given.get("api_key") and (not named or kind == ProxyErrorTypes.auth_error)
    if proxy.prisma_client is not None or (named and not unknown and not missing):
        return original(*args, **given)
    status = 401
    if unknown:
        message = f"Wrong key: {REMEDY}"
    elif missing:
        message = f"No key: {REMEDY}"
    else:  # a parameter that a client may not set (`is_request_body_safe`)
        message, status = str(error), 400
    raise ProxyException(message, ProxyErrorTypes.auth_error, None, status)
