"""Fetching over http: bounds held against real servers, and hosts that must not be reached."""

import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import ThreadingHTTPServer

import httpx
import pytest
from PIL import Image

from local_server import Handler, serving
from mlx_provider.chat.media.fetch import Source, fetch_remote, is_public
from mlx_provider.chat.media.load import MediaPolicy, load_media
from mlx_provider.chat.messages.parts import MediaRef
from mlx_provider.errors import MediaError
from tiny_pictures import encoded

OPEN = MediaPolicy(allow_private=True, timeout=300)
PUBLIC = "93.184.215.14"


def picture(width: int) -> bytes:
    return encoded(Image.new("RGB", (width, 1), "red"))


class Pictures(Handler):
    """`/<width>` answers a picture that wide; other paths misbehave in the way they name."""

    seen: list[str]

    def do_GET(self) -> None:
        self.server.seen.append(self.headers["Host"])  # type: ignore[attr-defined]
        name = self.path.strip("/")
        if name.startswith("redirect"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/redirect") or "/redirect")
            self.end_headers()
        elif name == "missing":
            self.send_error(404)
        elif name == "lies":
            self.answer(b"x" * 10, content_length=f"{10**9}")
        elif name == "gzip":
            self.answer(b"x", content_encoding="gzip")
        elif name == "flood":
            self.flood()
        else:
            self.answer(picture(int(name)))

    def flood(self) -> None:
        self.send_response(200)
        self.end_headers()
        try:
            while True:
                self.wfile.write(b"x" * 4096)
        except OSError:
            return


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with serving(Pictures) as running:
        running.seen = []  # type: ignore[attr-defined]
        yield running


@contextmanager
def never_ending(opening: bytes) -> Iterator[str]:
    """A server that sends an opening, then a byte now and then, without end."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.02)

        def serve() -> None:
            while not stop.is_set():
                with suppress(OSError):  # nobody has come yet, or the client has gone
                    connection, _ = listener.accept()
                    with connection:
                        connection.sendall(opening)
                        while not stop.wait(0.02):
                            connection.sendall(b"a")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            stop.set()
            thread.join()


def url(server: ThreadingHTTPServer, path: object, host: str = "127.0.0.1") -> str:
    return f"http://{host}:{server.server_address[1]}/{path}"


def refs(*urls: str) -> list[MediaRef]:
    return [MediaRef("image", u, f"messages[0].content[{i}]") for i, u in enumerate(urls)]


def refuse(source: str, policy: MediaPolicy = OPEN) -> str:
    with pytest.raises(MediaError) as refused:
        load_media(refs(source), policy)
    assert refused.value.param == "messages[0].content[0]"
    return refused.value.message


def test_pictures_keep_their_order(server: ThreadingHTTPServer) -> None:
    widths = [7, 3, 7, 11, 5, 2, 9, 1, 4, 6]
    items = load_media(refs(*(url(server, width) for width in widths)), OPEN)
    assert [item.pixels.shape[1] for item in items] == widths


def test_redirects_are_followed_up_to_the_limit(server: ThreadingHTTPServer) -> None:
    assert load_media(refs(url(server, "redirect/redirect/4")), OPEN)[0].pixels.shape == (1, 4, 3)
    assert "redirect" in refuse(url(server, "redirect")).lower()
    assert len(server.seen) == 3 + 1 + OPEN.max_redirects  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("path", "words"),
    [("missing", "404"), ("lies", "more than 1000"), ("flood", "more than 1000"), ("gzip", "comp")],
)
def test_a_bad_response_is_refused(server: ThreadingHTTPServer, path: str, words: str) -> None:
    message = refuse(url(server, path), MediaPolicy(allow_private=True, max_bytes=1000))
    assert words in message


def test_redirect_to_a_file_is_not_followed(server: ThreadingHTTPServer) -> None:
    assert "root:" not in refuse(url(server, "redirectfile:///etc/passwd"))


@pytest.mark.parametrize(
    "opening",
    [b"", b"HTTP/1.1 200 OK\r\nX-Head: ", b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n"],
    ids=["silence", "headers", "body"],
)
def test_a_download_that_never_ends_is_stopped_at_the_time_limit(opening: bytes) -> None:
    with never_ending(opening) as address:
        message = refuse(address, MediaPolicy(allow_private=True, timeout=0.3))
    assert "within 0.3 seconds" in message


def test_a_hanging_name_resolution_is_stopped_at_the_time_limit() -> None:
    release = threading.Event()

    def resolve(host: str, port: int) -> list[str]:
        release.wait(20)
        return []

    with pytest.raises(MediaError, match=r"within 0\.1 seconds"):
        fetch_remote([Source("http://slow.test/", "p")], MediaPolicy(timeout=0.1), resolve)
    release.set()


def test_a_dead_server_is_named() -> None:
    with socket.socket() as taken:  # nobody else may listen there meanwhile
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert f"http://127.0.0.1:{port}/x.png" in refuse(f"http://127.0.0.1:{port}/x.png")


PRIVATE = [
    "127.0.0.1", "127.9.9.9", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254",
    "100.64.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255", "240.0.0.1", "::1", "::",
    "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
    "64:ff9b::7f00:1", "2002:7f00:1::", "192.0.2.1",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_private_and_reserved_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)

    def resolve(host: str, port: int) -> list[str]:
        return [PUBLIC, address]

    with pytest.raises(MediaError, match="not a public host"):
        fetch_remote([Source("http://name.test/a.png", "p")], MediaPolicy(timeout=300), resolve)


@pytest.mark.parametrize("address", [PUBLIC, "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "1.1.1.1"])
def test_global_addresses_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "[::ffff:127.0.0.1]", "user@127.0.0.1", "localhost",
     "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0x7f.1", "017700000001"],
)  # fmt: skip
def test_loopback_is_refused_by_default(server: ThreadingHTTPServer, address: str) -> None:
    """Also a number that resolvers read as an address."""
    source = f"http://{address}:{server.server_address[1]}/1"
    message = refuse(source, MediaPolicy(timeout=300))
    assert "allow_media: [private]" in message or "Invalid IPv4 address" in message
    assert server.seen == []  # type: ignore[attr-defined]


def test_the_connection_goes_to_the_address_that_was_checked(server: ThreadingHTTPServer) -> None:
    asked: list[str] = []

    def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    source = url(server, 3, "pictures.test")
    assert fetch_remote([Source(source, "p")], OPEN, resolve) == [picture(3)]
    assert asked == ["pictures.test"]
    assert server.seen == [f"pictures.test:{server.server_address[1]}"]  # type: ignore[attr-defined]


def test_the_next_address_of_a_host_is_tried_if_one_fails(server: ThreadingHTTPServer) -> None:
    source = Source(url(server, 3, "pictures.test"), "p")
    assert fetch_remote([source], OPEN, lambda host, port: ["::1", "127.0.0.1"]) == [picture(3)]


def fetch_through(
    answer: Callable[[httpx.Request], httpx.Response], names: dict[str, str], start: str
) -> list[bytes | MediaError]:
    """Through the checks, with `answer` in place of the network."""

    async def network(_: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        return answer(request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", network)
        return fetch_remote(
            [Source(start, "p")], MediaPolicy(timeout=300), lambda host, port: [names[host]]
        )


def test_a_redirect_to_a_private_host_is_refused() -> None:
    hops: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        hops.append(str(request.url))
        return httpx.Response(302, headers={"Location": "http://inside.test/secret"})

    names = {"outside.test": PUBLIC, "inside.test": "10.0.0.7"}
    with pytest.raises(MediaError, match=r"inside\.test is not a public host"):
        fetch_through(answer, names, "http://outside.test/a")
    assert hops == [f"http://{PUBLIC}/a"]


def test_a_tls_request_to_a_checked_address_keeps_the_host_name() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.host == PUBLIC
        assert request.headers["Host"] == "outside.test"
        assert request.extensions["sni_hostname"] == "outside.test"
        return httpx.Response(200, content=stream())

    async def stream() -> AsyncIterator[bytes]:
        yield b"whole"

    assert fetch_through(answer, {"outside.test": PUBLIC}, "https://outside.test/a") == [b"whole"]
