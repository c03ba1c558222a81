"""Running servers of any kind with OpenAI's API."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from mlx_provider.errors import BadRequest, EngineUnavailable

OURS = "mlx-provider"
LOOK = 10.0
"""Seconds for a server to list its models."""


@dataclass(frozen=True)
class Other:
    name: str
    base: str
    """The address that `/chat/completions` is added to."""
    model: str = ""
    """Its name of the model; if unset, the first one in its list."""
    option: str = ""
    """As it was written."""

    @property
    def variable(self) -> str:
        """The environment variable that may hold its key."""
        return re.sub(r"\W", "_", self.name).upper() + "_API_KEY"


def parse_other(text: str) -> Other:
    """From `NAME=URL[,model]`; an address without a path gets OpenAI's `/v1`.

    Raises `BadRequest`, also for a key in the address: other users of the machine could read it.
    """
    name, equals, rest = text.partition("=")
    url, _, model = rest.partition(",")
    parts = urlsplit(url)
    if not (equals and re.fullmatch(r"[\w.-]+", name) and parts.scheme in ("http", "https")):
        raise BadRequest(f"--server {text!r} is no NAME=URL[,model]", param="server")
    if name.startswith(OURS):
        raise BadRequest(f"--server {name}: that is our own name; choose another", param="server")
    if "@" in parts.netloc or parts.query:
        raise BadRequest(
            f"--server {name}: no key in the address; it is read from {Other(name, '').variable}",
            param="server",
        )
    base = url.rstrip("/") if parts.path.strip("/") else f"{url.rstrip('/')}/v1"
    return Other(name, base, model, text)


def key_of(other: Other, environ: Mapping[str, str] = os.environ) -> str:
    """The key from the environment; any word for servers that need none."""
    return environ.get(other.variable) or "none"


def model_of(other: Other) -> str:
    """The server's name of its model. Raises `EngineUnavailable` with the reason if it is unknown.

    Finds an address without a server before anything is measured. If a server answers but does not
    list its models like OpenAI's API, the user's name of the model is used.
    """
    address = f"{other.base}/models"
    try:
        headers = {"authorization": f"Bearer {key_of(other)}"}
        reply = httpx.get(address, headers=headers, timeout=LOOK, trust_env=False)
    except httpx.HTTPError as error:
        raise EngineUnavailable(f"{address}: {error or type(error).__name__}") from None
    try:
        listed = [str(each["id"]) for each in reply.raise_for_status().json()["data"]]
    except (httpx.HTTPStatusError, ValueError, KeyError, TypeError):
        listed = []
    if other.model or listed:
        return other.model or listed[0]
    raise EngineUnavailable(
        f"{address} (status {reply.status_code}) lists no model: name one after the address, "
        f"{other.name}={other.base},MODEL"
    )
