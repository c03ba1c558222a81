"""Bodies and prompts that are too large, against a real engine process."""

import json
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engine_process import EngineProcess, engine_process
from mlx_provider.client.http import HttpClient
from mlx_provider.client.messages import Address
from mlx_provider.errors import BodyTooLarge
from mlx_provider.protocol.requests import GenerateRequest
from waiting import wait_until

MB = 2**20
LIMIT = 8 * MB
FOX = "The quick brown fox jumps over the lazy dog. "

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with engine_process({"body_bytes": LIMIT}) as running:
        assert running.ask("Hello")[0] == 200
        yield running


def body_of(size: int) -> bytes:
    """A request of about so many bytes."""
    text = FOX * (size // len(FOX))
    return json.dumps({"model": "demo", "prompt": text, "max_tokens": 1}).encode()


def refused(answer: tuple[int, list[dict[str, Any]]]) -> str:
    status, (error,) = answer
    assert (status, error["code"]) == (413, "body_too_large"), error
    return str(error["message"])


def test_an_announced_length_is_refused(engine: EngineProcess) -> None:
    message = refused(engine.post(body_of(9 * MB)))
    assert str(LIMIT) in message
    assert "send fewer or smaller images" in message


def test_a_body_in_chunks_is_counted_while_it_comes(engine: EngineProcess) -> None:
    piece = FOX.encode() * (MB // len(FOX))

    def chunks() -> Iterator[bytes]:
        yield b'{"model": "demo", "prompt": "'
        yield from (piece for _ in range(64))

    before = engine.forget_peak()
    assert "send fewer or smaller images" in refused(engine.post(chunks()))
    assert engine.memory("VmHWM") - before < 2 * LIMIT


def head(length: int) -> bytes:
    return b"POST /v1/generate HTTP/1.1\r\nhost: engine\r\ncontent-length: %d\r\n\r\n" % length


def connected(engine: EngineProcess, sent: bytes) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(engine.socket))
    client.sendall(sent)
    return client


def test_a_wrong_content_length_does_not_block_other_requests(engine: EngineProcess) -> None:
    with connected(engine, head(1000) + b'{"model": '):
        assert engine.ask("Hello")[0] == 200
    absurd = head(10**15).replace(b"\r\n\r\n", b"\r\nexpect: 100-continue\r\n\r\n")
    with connected(engine, absurd) as client:
        assert b" 413 " in client.recv(4096)
    with connected(engine, head(3) + b"[1]{}junk") as client:
        assert b" 400 " in client.recv(4096)
    assert engine.ask("Hello")[0] == 200


def test_a_body_of_millions_of_values_is_refused(engine: EngineProcess) -> None:
    before = engine.forget_peak()
    bomb = b'{"model": "demo", "messages": [' + b"{}," * (5 * MB // 3) + b"{}]}"
    bomb = bomb.replace(b"{},", b"[],[[", 2 * MB)[: 7 * MB]
    assert "values" in refused(engine.post(bomb))
    assert engine.memory("VmHWM") - before < 3 * LIMIT


def test_commas_and_brackets_inside_a_text_are_not_counted_as_values(engine: EngineProcess) -> None:
    text = r"[{,\"],\\" * 700_000
    body = b'{"model": "demo", "prompt": "' + text.encode() + b'"}'
    status, (error,) = engine.post(body)
    assert (status, error["code"]) == (400, "context_length_exceeded")


def test_the_client_raises_body_too_large_for_a_large_body(engine: EngineProcess) -> None:
    client = HttpClient(Address("http://engine", str(engine.socket)))
    try:
        with pytest.raises(BodyTooLarge, match="smaller images"):
            client.submit(GenerateRequest(model="demo", prompt="x" * (9 * MB)))
    finally:
        client.close()


def test_a_prompt_of_megabytes_takes_less_than_100_mb(engine: EngineProcess) -> None:
    before = engine.forget_peak()
    for content in (FOX * (5 * MB // len(FOX)), "1 " * (2 * MB)):
        status, (error,) = engine.ask(content)
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert "> 65535 maximum" in error["message"]
    assert engine.memory("VmHWM") - before < 100 * MB


def test_concurrent_bodies_share_a_limit_and_small_ones_pass(engine: EngineProcess) -> None:
    before = engine.forget_peak()
    with ThreadPoolExecutor(14) as pool, connected(engine, head(LIMIT) + b'{"model": ') as holder:
        for _ in range(4):  # turns of its loop, in which this body takes the room
            assert engine.http.get("/health").status_code == 200
        waiting = [pool.submit(engine.post, body_of(7 * MB)) for _ in range(12)]
        for _ in range(3):
            assert engine.ask("Hello")[0] == 200
        assert not any(future.done() for future in waiting), "there was room for more than one"
        holder.close()
        answers = [future.result() for future in waiting]
    assert {status for status, _ in answers} == {400}
    assert engine.memory("VmHWM") - before < 7 * LIMIT, "the twelve are 10 times the limit"
    wait_until(lambda: engine.memory("VmRSS") - before <= LIMIT // 2)


def test_a_body_that_waits_for_memory_gets_503_when_the_engine_ends() -> None:
    with engine_process({"body_bytes": 2 * MB}) as engine:
        holder = connected(engine, head(2 * MB) + b" " * (2 * MB - 1))
        assert engine.http.get("/health").status_code == 200
        waiting = connected(engine, head(3 * MB // 2) + b"{" * 1000)
        for _ in range(3):  # turns of its loop after the one in which it takes the request
            assert engine.http.get("/health").status_code == 200
        engine.process.terminate()
        answer = b""
        while piece := waiting.recv(65536):
            answer += piece
        holder.close()
        waiting.close()
    assert b" 503 " in answer.splitlines()[0]
    assert b'"engine_unavailable"' in answer


def test_a_long_prompt_does_not_delay_other_requests(engine: EngineProcess) -> None:
    """While one is tokenised again and again, others come and go."""
    stop = threading.Event()

    def busy() -> int:
        count = 0
        while not stop.is_set():
            assert engine.ask("1 " * MB)[0] == 400
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(busy)
        for _ in range(5):
            assert engine.ask(FOX)[0] == 200
        stop.set()
        assert running.result() > 0


def test_json_values_inside_call_arguments_are_counted(engine: EngineProcess) -> None:
    before = engine.forget_peak()
    for item in ("{},", '"",'):
        arguments = "[" + item * (MB // 2) + "1]"
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        turns = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ]
        status, (error,) = engine.post(json.dumps({"model": "demo", "messages": turns}).encode())
        assert (status, error["param"]) == (400, "messages[1]"), error
        assert "JSON values" in error["message"]
    assert engine.memory("VmHWM") - before < 4 * LIMIT
