"""The arguments of a custom handler of LiteLLM."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from ..errors import BadRequest, RequestTimedOut
from ..invalid import shown

ENCODED_PREFIX = f"mlx{secrets.token_hex(8)}"
"""Prefix of ids by `encoded`; a client cannot guess it."""
ENCODED = re.compile(ENCODED_PREFIX + "((%[0-9A-F]{2})+)")


@dataclass(frozen=True)
class Deadline:
    """LiteLLM sets a limit but never enforces it."""

    limit: float | None
    """Seconds; `None`: no limit."""
    ends: float | None
    """Time of `time.monotonic`."""

    @classmethod
    def after(cls, timeout: object) -> Deadline:
        """`timeout`: seconds, an `httpx.Timeout`, or `None`."""
        seconds = getattr(timeout, "read", timeout)
        if seconds is None:
            return cls(None, None)
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or seconds <= 0:
            raise BadRequest(f"timeout must be a number of seconds above 0, got {shown(seconds)}")
        return cls(seconds, time.monotonic() + seconds)

    def left(self) -> float | None:
        """Seconds. Raises `RequestTimedOut` if there are none."""
        if self.ends is None:
            return None
        seconds = self.ends - time.monotonic()
        if seconds <= 0:
            raise self.passed()
        return seconds

    def passed(self) -> RequestTimedOut:
        return RequestTimedOut(f"the request's time limit of {self.limit:g} s has passed")


@dataclass(frozen=True)
class Call:
    model: str
    messages: list[Any]
    params: Mapping[str, Any]
    """`optional_params` with `extra_body` merged in; absent and `None` are the same."""
    litellm_params: Mapping[str, Any]
    api_base: str | None
    api_key: str | None
    deadline: Deadline
    logging: Any

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Call:
        """From the keyword arguments of `CustomLLM.completion` (litellm 1.106.2, main.py)."""
        params = dict(given.get("optional_params") or {})
        extra = params.pop("extra_body", None) or {}
        if not isinstance(extra, Mapping):
            raise BadRequest("extra_body must be an object", param="extra_body")
        params.update(extra)
        return cls(
            model=decoded(given["model"]),
            messages=given.get("messages") or [],
            params={name: value for name, value in params.items() if value is not None},
            litellm_params=given.get("litellm_params") or {},
            api_base=given.get("api_base") or None,
            api_key=given.get("api_key") or None,
            deadline=Deadline.after(given.get("timeout")),
            logging=given["logging_obj"],
        )

    @property
    def deployment(self) -> str | None:
        """Id of the config entry that the router chose; `None`: there is no router."""
        info = self.litellm_params.get("model_info")
        found = info.get("id") if isinstance(info, Mapping) else None
        return found if isinstance(found, str) else None

    @property
    def text_completion(self) -> bool:
        """Whether the client called `/completions`: the prompt is raw text."""
        return self.litellm_params.get("text_completion") is True


def encoded(model: str) -> str:
    return ENCODED_PREFIX + "".join(f"%{byte:02X}" for byte in model.encode())


def decoded(model: str) -> str:
    """Ids that `encoded` did not make stay the same."""
    found = ENCODED.fullmatch(model)
    return unquote(found[1]) if found else model
