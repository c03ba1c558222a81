"""Replies over TLS, cut off anywhere, and read in any thread."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from mlx_provider.client.generation import Generation
from mlx_provider.client.messages import Address
from mlx_provider.client.transport import Transport
from mlx_provider.errors import EngineUnavailable
from mlx_provider.protocol.events import EVENT_BATCH, Accepted, Delta, Done, Failed, Timings, Usage

ACCEPTED = Accepted(id="r", model="m", prompt_tokens=1, max_tokens=9)
DONE = Done(
    usage=Usage(prompt_tokens=1, completion_tokens=1),
    timings=Timings(queued=0, prefill=0, first_token=0, total=0, tokens_per_second=0),
)
TEXT = "word " * 50_000
"""Of several records of TLS."""
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
Serve = Callable[[socket.socket], None]


def line(*events: Any) -> bytes:
    body = EVENT_BATCH.dump_json(list(events)) + b"\n"
    return b"%x\r\n%s\r\n" % (len(body), body)


WHOLE = HEAD + line(ACCEPTED) + line(Delta(content=TEXT)) + line(DONE) + b"0\r\n\r\n"


def answering(data: bytes) -> Serve:
    """Reads the head and the body of a request and sends so many bytes."""

    def serve(connection: socket.socket) -> None:
        got = b""
        while not got.endswith(b"BODY"):
            got += connection.recv(2**16)
        connection.sendall(data)

    return serve


@contextmanager
def engine(serve: Serve, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The address of a server that answers one connection."""
    listening = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):  # its client may have turned away
            talking = connection if tls is None else tls.wrap_socket(connection, server_side=True)
            with talking:
                serve(talking)

    thread = threading.Thread(target=run)
    thread.start()
    with listening:
        scheme = "http" if tls is None else "https"
        yield f"{scheme}://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(300)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of this machine's own address, with its key."""
    from ipaddress import ip_address

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "engine")])
    here = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
        .add_extension(here, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, private = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    secret = key.private_bytes(pem, private, serialization.NoEncryption())
    path.write_bytes(secret + signed.public_bytes(pem))
    return path


def sent(url: str, body: bytes = b"BODY") -> Generation:
    return Transport(Address(url), {"authorization": "Bearer k"}).send("/v1/generate", body)


def read(events: Any) -> list[Any]:
    found = []
    while batch := events.get(300):
        found += batch
    return found


async def aread(events: Any) -> list[Any]:
    found = []
    while batch := await events.aget(300):
        found += batch
    return found


def said(events: list[Any]) -> str:
    return "".join(event.content for event in events if isinstance(event, Delta))


@pytest.mark.parametrize("in_loop", [False, True])
def test_a_reply_is_read_over_tls(
    certificate: Path, in_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    theirs.load_cert_chain(certificate)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with engine(answering(WHOLE), theirs) as url:
        generation = sent(url)
        found = asyncio.run(aread(generation)) if in_loop else read(generation)
    assert generation.accepted == ACCEPTED
    assert said(found) == TEXT
    assert found[-1] == DONE


def test_a_server_without_a_trusted_certificate_receives_no_request(certificate: Path) -> None:
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    theirs.load_cert_chain(certificate)

    talked: list[socket.socket] = []
    with (
        engine(talked.append, theirs) as url,
        pytest.raises(EngineUnavailable, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        sent(url)
    assert talked == []


@pytest.mark.parametrize("in_loop", [False, True])
def test_a_connection_cut_at_any_byte_gives_one_engine_died_error(in_loop: bool) -> None:
    """Before an answer it was not taken, or its engine died; afterwards it died, once."""
    head = len(HEAD + line(ACCEPTED))
    for cut in (0, 5, len(HEAD), head - 3, head, head + 40, len(WHOLE) - 200, len(WHOLE) - 2):
        with engine(answering(WHOLE[:cut])) as url:
            try:
                generation = sent(url)
            except EngineUnavailable:
                assert cut < head - 2
                continue
            assert cut > head - 3
            found = asyncio.run(aread(generation)) if in_loop else read(generation)
        assert isinstance(found[-1], Done if cut > len(WHOLE) - 10 else Failed)
        assert all(isinstance(event, Delta) for event in found[:-1])
        if isinstance(found[-1], Failed):
            assert found[-1].error.code == "engine_died"
        assert generation.get() == []


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 204 No\r\n\r\n", b"SSH-2.0\r\n\r\n", HEAD + b"3\r\n[]\n\r\n" + b"0\r\n\r\n"],
)
def test_a_reply_that_is_no_protocol_of_an_engine_is_unavailable(answer: bytes) -> None:
    with engine(answering(answer)) as url, pytest.raises(EngineUnavailable):
        sent(url)


@pytest.mark.parametrize("page", [b"", b"<html>", b"<html>\n"])
def test_a_web_server_at_the_address_is_refused(page: bytes) -> None:
    def serve(connection: socket.socket) -> None:
        connection.recv(2**16)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + page)

    with (
        engine(serve) as url,
        pytest.raises(EngineUnavailable, match="no engine of mlx-provider: it sent"),
    ):
        Transport(Address(url), {}).attach()


def test_a_refusal_is_read_although_the_server_did_not_read_the_body() -> None:
    """Who refuses a request may not read it to its end."""
    refusal = b'{"error": {"message": "too large", "code": "bad_request", "status": 400}}'

    def refuse(connection: socket.socket) -> None:
        connection.recv(100)
        head = b"HTTP/1.1 400 Bad\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        connection.sendall(head % len(refusal) + refusal)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(2**16):
            pass

    with engine(refuse) as url, pytest.raises(Exception, match="too large"):
        sent(url, body=b"x" * 2**22)


def test_a_reader_in_a_thread_is_woken_by_close() -> None:
    ends: list[bytes] = []

    def wait(connection: socket.socket) -> None:
        answering(HEAD + line(ACCEPTED) + line(Delta(content="x")))(connection)
        ends.append(connection.recv(1))

    with engine(wait) as url, ThreadPoolExecutor(1) as pool:
        generation = sent(url)
        assert said(generation.get(300)) == "x"
        reading = pool.submit(generation.get)
        generation.close()
        [last] = reading.result(300)
    assert ends == [b""]
    assert isinstance(last, Failed)
    assert last.error.code == "request_failed"


def test_a_base_url_may_have_a_path() -> None:
    asked: list[bytes] = []

    def keep(connection: socket.socket) -> None:
        asked.append(connection.recv(2**16))
        connection.sendall(WHOLE)

    with engine(keep) as url:
        read(sent(url + "/engine"))
    assert asked[0].startswith(b"POST /engine/v1/generate HTTP/1.1\r\n")
