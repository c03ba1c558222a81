"""The address of an engine: `http(s)://host:port` or `unix:/path/to.sock`."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

import httpx

from ..errors import BadRequest


@dataclass(frozen=True)
class Address:
    url: str
    """For a unix socket only a label."""
    socket: str | None = None

    def __str__(self) -> str:
        return f"unix:{self.socket}" if self.socket else self.url


def parse_address(api_base: str) -> Address:
    """A trailing `/v1` is ignored. Raises `BadRequest` that names the two forms."""
    if api_base.startswith("unix:"):
        path = api_base.removeprefix("unix:").removeprefix("//")
        if path.startswith("/"):
            return Address("http://engine", path)
    else:
        try:
            url = httpx.URL(api_base)
        except httpx.InvalidURL:
            url = httpx.URL("")
        if url.scheme in ("http", "https") and url.host:
            return Address(api_base.rstrip("/").removesuffix("/v1").rstrip("/"))
    raise BadRequest(
        f"api_base {api_base!r} is neither http(s)://host:port nor unix:/path/to.sock",
        param="api_base",
    )


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
