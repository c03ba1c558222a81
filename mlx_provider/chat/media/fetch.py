"""The bytes of a media URL (`data:`, `http(s):`, or a local file), within the operator's limits.
Every hop of http(s) is resolved once and its addresses are checked; the connection goes to a
checked address, so rebinding of the name has no effect."""

from __future__ import annotations

import asyncio
import binascii
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import httpx

from ...errors import MediaError


@dataclass(frozen=True)
class MediaPolicy:
    """Limits on the media of one request: pixels are width × height × frames, times are in seconds.
    `allow_private`: hosts in private networks; `allow_file`: local files."""

    allow_private: bool = False
    allow_file: bool = False
    max_bytes: int = 20 * 2**20
    max_total_bytes: int = 128 * 2**20  # of http(s) URLs only
    max_pixels: int = 64_000_000
    max_total_pixels: int = 256_000_000
    max_frames: int = 256
    max_clip_pixels: int = 32_000_000
    clip_timeout: float = 20.0
    timeout: float = 20.0
    max_redirects: int = 3
    max_parallel: int = 8


@dataclass(frozen=True)
class Source:
    """A URL, or the path of a file. `path`: the part of the request that holds it, for errors."""

    url: str
    path: str
    required: bool = True

    def error(self, reason: str, brief: str = "not available") -> MediaError:
        """A new `MediaError` about this source; not raised."""
        return MediaError(f"{self.path}: {reason}", param=self.path, brief=brief)

    @property
    def short_url(self) -> str:
        """In quotes, for errors: at most 120 characters of the URL."""
        return repr(self.url if len(self.url) <= 120 else self.url[:117] + "...")


Fetched = bytes | MediaError
Address = IPv4Address | IPv6Address
Resolve = Callable[[str, int], Sequence[str]]  # (host, port) -> addresses; raises `OSError`
_REMOTE = ("http", "https")
_NAT64 = IPv6Network("64:ff9b::/96")
_URL_SAFE = str.maketrans("-_", "+/")


class HostRefused(httpx.TransportError):
    """An address of the host is not public."""


def system_addresses(host: str, port: int) -> list[str]:
    """A `Resolve` with the system's resolver."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def fetch_remote(
    sources: Sequence[Source], policy: MediaPolicy, resolve: Resolve = system_addresses
) -> list[Fetched]:
    """Like `fetch_all`, for http(s) only. Raises the error of the first required one to fail."""
    return asyncio.run(_fetch_together(sources, policy, resolve))


async def _fetch_together(
    sources: Sequence[Source], policy: MediaPolicy, resolve: Resolve
) -> list[Fetched]:
    deadline = asyncio.get_running_loop().time() + policy.timeout
    slots = asyncio.Semaphore(policy.max_parallel)
    room = _Room(policy.max_total_bytes)
    transport = _CheckedTransport(policy, resolve)
    async with httpx.AsyncClient(
        transport=transport,
        trust_env=False,  # a proxy would resolve names out of our sight
        follow_redirects=True,
        max_redirects=policy.max_redirects,
        timeout=policy.timeout,
        headers={"Accept": "image/*", "Accept-Encoding": "identity"},
    ) as client:

        async def fetch(source: Source) -> Fetched:
            try:
                async with asyncio.timeout_at(deadline), slots:
                    return await _download(client, source, policy.max_bytes, room)
            except TimeoutError:
                late = f"{source.short_url} did not arrive within {policy.timeout:g} seconds"
                error = source.error(late)
            except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as failure:
                reason = str(failure) or type(failure).__name__
                error = source.error(f"cannot fetch {source.short_url} ({reason})")
            except MediaError as refusal:
                error = refusal
            if source.required:
                raise error
            return error

        return await asyncio.gather(*map(fetch, sources))


@dataclass
class _Room:
    left: int  # bytes

    def take(self, size: int, source: Source) -> None:
        self.left -= size
        if self.left < 0:
            raise source.error("the media of this request have too many bytes together")


async def _download(
    client: httpx.AsyncClient, source: Source, max_bytes: int, room: _Room
) -> bytes:
    async with client.stream("GET", source.url.strip()) as response:
        if not response.is_success:
            raise source.error(f"{source.short_url} answers {response.status_code}")
        if response.headers.get("content-encoding", "identity") != "identity":
            compressed = "sends a compressed answer, which was not requested"
            raise source.error(f"{source.short_url} {compressed}")
        too_large = source.error(f"{source.short_url} has more than {max_bytes} bytes")
        length = response.headers.get("content-length", "")
        if length.isdecimal() and int(length) > max_bytes:
            raise too_large
        data = bytearray()
        async for piece in response.aiter_raw():
            data += piece
            room.take(len(piece), source)
            if len(data) > max_bytes:
                raise too_large
        return bytes(data)


class _CheckedTransport(httpx.AsyncBaseTransport):
    """Connects to a checked address of the host; `Host` and TLS keep the name."""

    def __init__(self, policy: MediaPolicy, resolve: Resolve) -> None:
        self._policy, self._resolve = policy, resolve
        # A kept connection would be found by its address and could serve another name.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._inner = httpx.AsyncHTTPTransport(limits=limits, trust_env=False)
        # A pool of our own: asyncio.run would wait for a stuck resolver in its default pool.
        self._resolvers = ThreadPoolExecutor(policy.max_parallel, "media-dns")

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.raw_host.decode("ascii")
        port = request.url.port or (443 if request.url.scheme == "https" else 80)
        addresses = await self._check(host, port)
        for address in addresses[:-1]:
            with suppress(httpx.ConnectError):
                return await self._send(request, host, address)
        return await self._send(request, host, addresses[-1])

    async def _check(self, host: str, port: int) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        addresses = await loop.run_in_executor(self._resolvers, self._resolve, host, port)
        if not addresses:
            raise httpx.ConnectError(f"{host} has no address")
        if not self._policy.allow_private and not all(map(is_public, addresses)):
            remedy = "the operator can set allow_media: [private]"
            raise HostRefused(f"{host} is not a public host; {remedy}")
        return addresses

    async def _send(self, request: httpx.Request, host: str, address: str) -> httpx.Response:
        pinned = httpx.Request(
            request.method,
            request.url.copy_with(host=address),
            headers=request.headers,
            stream=request.stream,
            extensions={**request.extensions, "sni_hostname": host},
        )
        return await self._inner.handle_async_request(pinned)

    async def aclose(self) -> None:
        self._resolvers.shutdown(wait=False, cancel_futures=True)
        await self._inner.aclose()


def is_public(address: str) -> bool:
    """Whether an IP address is public. If IPv6 wraps an IPv4 address, the latter counts."""
    found = _unwrap(ip_address(address.partition("%")[0]))
    special = found.is_multicast or found.is_reserved or found.is_unspecified
    return found.is_global and not special


def _unwrap(address: Address) -> Address:
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


def fetch_all(sources: Sequence[Source], policy: MediaPolicy) -> Iterator[Fetched]:
    """The bytes of each source, in order, or the error of one that is not required. Raises
    `MediaError` if a required one fails. Blocks."""
    remote = [source for source in dict.fromkeys(sources) if _scheme(source.url) in _REMOTE]
    own = dict.fromkeys(s for s in sources if _scheme(s.url) not in _REMOTE)
    local = {source: _read(source, policy) for source in own}
    if remote:
        local.update(zip(remote, fetch_remote(remote, policy), strict=True))
    return iter([local[source] for source in sources])


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
            f"{source.short_url} is a local file, which this server does not read; send a data: or "
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
    try:
        return binascii.a2b_base64(text, strict_mode=True)  # without a copy of the text
    except (binascii.Error, ValueError):
        text = re.sub(r"\s+", "", unquote(text)).rstrip("=").translate(_URL_SAFE)
    return binascii.a2b_base64(text + "=" * (-len(text) % 4), strict_mode=True)


def _file(source: Source, max_bytes: int) -> bytes:
    is_url = _scheme(source.url) == "file"
    path = Path(unquote(urlsplit(source.url).path) if is_url else source.url).expanduser()
    try:
        # A device or a pipe may never end.
        if not path.is_file():
            raise source.error(f"{source.short_url} is not a file")
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as failure:
        raise source.error(f"cannot read {source.short_url} ({failure})") from None
    if len(data) > max_bytes:
        raise source.error(f"{source.short_url} has more than {max_bytes} bytes")
    return data
