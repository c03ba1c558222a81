"""Passes the warnings of a request to a header of the response.

LiteLLM reads headers only from complete chat responses (`_hidden_params`, 1.106.2). Streams and the
bridges of other routes share the call's logging object with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..wire.warnings import HEADER, header_text

KEPT = "mlx_warnings"


def keep_warnings(logging: Any, warnings: Sequence[str]) -> None:
    """Keep warnings of a request, after those that are known."""
    details = getattr(logging, "model_call_details", None)
    if warnings and isinstance(details, dict):
        details[KEPT] = list(dict.fromkeys([*details.get(KEPT, ()), *warnings]))


def warning_headers(logging: Any) -> dict[str, str] | None:
    """The headers of the proxy's response, which get the prefix `llm_provider-`; `None`: no
    warnings."""
    details = getattr(logging, "model_call_details", None) or {}
    found = details.get(KEPT)
    return {f"llm_provider-{HEADER}": header_text(found)} if found else None
