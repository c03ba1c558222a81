"""The bytes of a media URL: `data:`, `http(s):`, or a local file if allowed."""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from ...errors import MediaError
from .policy import MediaPolicy


@dataclass(frozen=True)
class Source:
    url: str
    path: str
    required: bool = True

    def error(self, reason: str, brief: str = "not available") -> MediaError:
        return MediaError(f"{self.path}: {reason}", param=self.path, brief=brief)

    @property
    def shown(self) -> str:
        return repr(self.url if len(self.url) <= 120 else self.url[:117] + "...")


Fetched = bytes | MediaError
"""The error of a source that is not required."""


def fetch_all(sources: Sequence[Source], policy: MediaPolicy) -> Iterator[Fetched]:
    """In order. Raises `MediaError` that names the part."""
    remote = [source for source in dict.fromkeys(sources) if _scheme(source.url) in _REMOTE]
    local = {source: _read(source, policy) for source in set(sources).difference(remote)}
    if remote:
        from .network import fetch_remote

        local.update(zip(remote, fetch_remote(remote, policy), strict=True))
    return iter([local[source] for source in sources])


_REMOTE = ("http", "https")


def _scheme(url: str) -> str:
    match = re.match(r"\s*([A-Za-z][A-Za-z0-9+.-]*):", url)
    return match[1].lower() if match else ""


def _read(source: Source, policy: MediaPolicy) -> Fetched:
    try:
        return _bytes(source, policy)
    except MediaError as error:
        if source.required:
            raise
        return error


def _bytes(source: Source, policy: MediaPolicy) -> bytes:
    scheme = _scheme(source.url)
    if scheme == "data":
        return _data_url(source, policy.max_bytes)
    if scheme not in ("", "file"):
        raise source.error(f"URLs of scheme {scheme!r} are not fetched; send a data: or https: URL")
    if not policy.allow_file:
        raise source.error(
            f"{source.shown} is a local file, which this server does not read; send a data: or "
            "https: URL, or let the operator set allow_media: [file]"
        )
    return _file(source, policy.max_bytes)


def _data_url(source: Source, max_bytes: int) -> bytes:
    head, comma, body = source.url.partition(",")
    if not comma:
        raise source.error("the data: URL has no comma before its data")
    if len(body) > 4 * max_bytes:
        raise source.error(f"the image has more than {max_bytes} bytes", "too large")
    if head.rstrip().lower().endswith(";base64"):
        try:
            data = _base64(body)
        except (binascii.Error, ValueError) as broken:
            raise source.error(f"the data: URL is not valid base64 ({broken})", "damaged") from None
    else:
        data = unquote_to_bytes(body)
    if not data:
        raise source.error("the data: URL is empty", "empty")
    if len(data) > max_bytes:
        raise source.error(f"the image has {len(data)} bytes, more than {max_bytes}", "too large")
    return data


def _base64(text: str) -> bytes:
    """Accepts white space, missing padding, and the URL-safe alphabet."""
    try:
        return binascii.a2b_base64(text, strict_mode=True)  # without a copy of the text
    except (binascii.Error, ValueError):
        text = re.sub(r"\s+", "", unquote(text)).rstrip("=").translate(_URL_SAFE)
    return binascii.a2b_base64(text + "=" * (-len(text) % 4), strict_mode=True)


_URL_SAFE = str.maketrans("-_", "+/")


def _file(source: Source, max_bytes: int) -> bytes:
    is_url = _scheme(source.url) == "file"
    path = Path(unquote(urlsplit(source.url).path) if is_url else source.url).expanduser()
    try:
        # A device or a pipe may never end.
        if not path.is_file():
            raise source.error(f"{source.shown} is not a file")
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as failure:
        raise source.error(f"cannot read {source.shown} ({failure})") from None
    if len(data) > max_bytes:
        raise source.error(f"{source.shown} has more than {max_bytes} bytes")
    return data
