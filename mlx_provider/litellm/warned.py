"""What of a request has no effect, on its way to a header of the response.

LiteLLM takes headers from chat's whole responses alone (`_hidden_params`, 1.106.2); streams and the
bridges of other routes have in common with them the call's logging object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..wire.warnings import HEADER, header_text

KEPT = "mlx_warnings"


def keep_warnings(logging: Any, warnings: Sequence[str]) -> None:
    """Keep the warnings of an accepted request."""
    details = getattr(logging, "model_call_details", None)
    if warnings and isinstance(details, dict):
        details[KEPT] = list(warnings)


def warning_headers(logging: Any) -> dict[str, str] | None:
    """The headers of the proxy's response, before which it puts `llm_provider-`; `None`: no
    warnings."""
    details = getattr(logging, "model_call_details", None) or {}
    found = details.get(KEPT)
    return {f"llm_provider-{HEADER}": header_text(found)} if found else None
