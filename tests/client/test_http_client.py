"""Requests, errors, cancellation and death, over the socket of a real process."""

import asyncio
import gc
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mlx_provider.client.http import HttpClient
from mlx_provider.client.messages import Address
from mlx_provider.errors import (
    BadRequest,
    ContextTooLong,
    EngineDied,
    EngineUnavailable,
    MLXProviderError,
    Overloaded,
    RequestFailed,
)
from mlx_provider.protocol.events import Accepted, Done, Failed
from waiting import PATIENCE


def test_a_thread_reads_the_events(client: Any, request_of: Any, read: Any, text: Any) -> None:
    generation = client.submit(request_of("count 20 0.002"))
    assert generation.accepted.prompt_tokens == 3
    events = read(generation)
    assert text(events) == "".join(f"{n} " for n in range(20))
    assert isinstance(events[-1], Done)
    assert not any(isinstance(event, Accepted) for event in events)
    assert generation.get() == []


async def test_an_event_loop_reads_while_other_tasks_run(
    client: Any, request_of: Any, text: Any
) -> None:
    silent = await asyncio.to_thread(client.submit, request_of("wait"))
    reading = asyncio.create_task(silent.aget(PATIENCE))
    generation = await asyncio.to_thread(client.submit, request_of("count 50 0.005"))
    events = []
    while batch := await generation.aget(PATIENCE):
        events += batch
    assert text(events).split()[-1] == "49"
    assert not reading.done()
    await asyncio.to_thread(silent.close)
    assert isinstance((await reading)[-1], Failed)


def test_threads_and_loops_read_at_once(client: Any, request_of: Any, read: Any, text: Any) -> None:
    def in_loop() -> Any:
        async def collect() -> Any:
            generation = await asyncio.to_thread(client.submit, request_of("count 30 0.002"))
            events = []
            while batch := await generation.aget():
                events += batch
            return events

        return asyncio.run(collect())

    def in_thread() -> Any:
        return read(client.submit(request_of("count 30 0.002")))

    with ThreadPoolExecutor(48) as pool:
        futures = [pool.submit(work) for work in [in_loop, in_thread] * 24]
        assert {text(f.result()) for f in futures} == {"".join(f"{n} " for n in range(30))}


def test_characters_that_some_call_line_ends_stay_inside_a_line(
    client: Any, request_of: Any, read: Any, text: Any
) -> None:
    words = "a\u2028b\u2029c\x85d\x1ce\r\nf\x0bg 😀"
    assert text(read(client.submit(request_of(f"text {words}")))) == words


@pytest.mark.parametrize(
    "error", [ContextTooLong, Overloaded, BadRequest], ids=lambda cls: cls.code
)
def test_errors_come_back_as_their_class(
    client: Any, request_of: Any, error: type[MLXProviderError]
) -> None:
    with pytest.raises(error) as caught:
        client.submit(request_of(f"fail {error.code}"))
    assert type(caught.value) is error
    assert (caught.value.message, caught.value.param) == ("scripted", "prompt")


def test_an_unexpected_error_is_an_internal_error(client: Any, request_of: Any, read: Any) -> None:
    with pytest.raises(MLXProviderError, match="internal error") as caught:
        client.submit(request_of("bug"))
    assert caught.value.code == "internal_error"
    assert read(client.submit(request_of("count 1 0")))


def test_a_request_that_json_cannot_hold_is_refused(client: Any, request_of: Any) -> None:
    with pytest.raises(BadRequest, match="JSON"):
        client.submit(request_of("x", template={"odd": object()}))
    with pytest.raises(BadRequest, match="JSON"):
        client.submit(request_of("x", options={"extra": {"odd": "\ud83d"}}))


def test_closing_a_generation_cancels_its_request_in_the_engine(
    client: Any, request_of: Any, read: Any, wait_until: Any
) -> None:
    closed = client.submit(request_of("wait", id="closed"))
    kept = client.submit(request_of("count 30 0.01", id="kept"))
    closed.close()
    closed.close()
    wait_until(lambda: "closed" in client.cache_report()["cancelled"])
    assert isinstance(read(kept)[-1], Done)
    assert "kept" not in client.cache_report()["cancelled"]
    assert isinstance(read(closed)[-1], Failed)


def test_dropping_a_generation_cancels_its_request_in_the_engine(
    client: Any, request_of: Any, wait_until: Any
) -> None:
    generation = client.submit(request_of("wait", id="dropped"))
    del generation
    gc.collect()
    wait_until(lambda: "dropped" in client.cache_report()["cancelled"])


def test_a_waiting_submit_ends_when_the_client_closes(
    client: Any, request_of: Any, wait_until: Any
) -> None:
    with ThreadPoolExecutor(1) as pool:
        client.submit(request_of("count 1 0"))
        waiting = pool.submit(client.submit, request_of("gate", id="held"))
        wait_until(lambda: "held" in client.cache_report()["submitted"])
        client.close()
        with pytest.raises(EngineUnavailable, match="closed"):
            waiting.result(PATIENCE)
    client.cache_clear()  # opens the gate
    wait_until(lambda: "held" in client.cache_report()["cancelled"])


def test_a_client_closes_while_the_thread_of_a_request_starts(
    client: Any, request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.submit(request_of("count 1 0"))
    start = threading.Thread.start

    def close_first(thread: threading.Thread) -> None:
        if thread.name == "mlx-provider client":
            client.close()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", close_first)
    with pytest.raises(EngineUnavailable, match="closed"):
        client.submit(request_of("wait"))


def test_a_closed_client_opens_again(client: Any, request_of: Any, read: Any) -> None:
    running = client.submit(request_of("wait"))
    client.close()
    assert isinstance(read(running)[-1], Failed)
    assert isinstance(read(client.submit(request_of("count 1 0")))[-1], Done)


def test_kill_ends_the_stream_at_once_and_the_next_request_works(
    client: Any, request_of: Any, read: Any
) -> None:
    for _ in range(2):
        generation = client.submit(request_of("wait"))
        pid = client.health().pid
        with ThreadPoolExecutor(1) as pool:
            reader = pool.submit(generation.get, PATIENCE)
            os.kill(pid, signal.SIGKILL)
            [last] = reader.result()
        assert isinstance(last, Failed)
        assert generation.get() == []
        assert isinstance(read(client.submit(request_of("count 2 0")))[-1], Done)
        assert client.health().pid != pid


def test_close_in_the_middle_of_an_engines_death_leaves_no_connection(
    local: Any, request_of: Any
) -> None:
    client = local.client()
    with ThreadPoolExecutor(32) as pool:
        generations = list(pool.map(client.submit, [request_of("wait")] * 32))
        pid = client.health().pid
        os.kill(pid, signal.SIGKILL)
        client.close()
    del generations
    gc.collect()
    assert [one for one in gc.get_objects() if _connected(one, local.folder)] == []


def _connected(thing: object, folder: Path) -> bool:
    if not isinstance(thing, socket.socket) or thing.family != socket.AF_UNIX or thing.fileno() < 0:
        return False
    try:
        return str(thing.getpeername()).startswith(str(folder))
    except OSError:
        return False


def test_a_request_that_kills_the_engine_is_not_sent_again(
    shared: Any, client: Any, request_of: Any
) -> None:
    client.submit(request_of("count 1 0"))
    log = shared.folder / "engine.log"
    starts = log.read_text().count(" engine on ")
    with pytest.raises(EngineDied):
        client.submit(request_of("slowexit"))
    assert log.read_text().count(" engine on ") == starts


def test_sigterm_gives_a_typed_event_and_the_next_request_a_new_engine(
    client: Any, request_of: Any, read: Any
) -> None:
    generation = client.submit(request_of("wait"))
    pid = client.health().pid
    os.kill(pid, signal.SIGTERM)
    last = read(generation)[-1]
    assert isinstance(last, Failed)
    assert last.error.code == "engine_unavailable"
    # Sent while the old engine still ends: waits for its lock, then starts a new one.
    assert isinstance(read(client.submit(request_of("count 1 0")))[-1], Done)
    assert client.health().pid != pid


def test_an_unread_generation_does_not_delay_another(
    client: Any, request_of: Any, read: Any, text: Any
) -> None:
    unread = client.submit(request_of("flood 1000", id="unread"))
    assert text(read(client.submit(request_of("count 20 0.001")))).split()[-1] == "19"
    events = read(unread)
    assert text(events) == "x" * 1_000_000
    assert len(events) < 1000


def test_a_question_to_a_silent_engine_ends_at_its_time_limit_or_with_its_client() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        client = HttpClient(Address(f"http://127.0.0.1:{silent.getsockname()[1]}"))
        with pytest.raises(EngineUnavailable, match=r"did not answer within 0\.2 s"):
            client.ask("GET", "/health", seconds=0.2)
        silent.accept()[0].close()
        asking = pool.submit(client.cache_report)
        with silent.accept()[0]:
            client.close()
            with pytest.raises(EngineUnavailable, match="closed"):
                asking.result(PATIENCE)


def test_the_error_of_an_unsent_request_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRequest, match="beyond ASCII"):
        HttpClient(Address("https://127.0.0.1:9"), "k\u00e9y")
    monkeypatch.setenv("SSL_CERT_FILE", "/nonexistent.pem")
    with pytest.raises(RequestFailed, match="request to the engine failed: FileNotFoundError"):
        HttpClient(Address("https://127.0.0.1:9")).send("/v1/generate", b"{}")


def test_an_address_without_an_engine_is_unavailable() -> None:
    for address in (Address("http://127.0.0.1:9"), Address("http://engine", "/nonexistent.sock")):
        client = HttpClient(address)
        with pytest.raises(EngineUnavailable, match="no engine answers"):
            client.health()
        client.close()


def test_health_does_not_start_an_engine(local: Any) -> None:
    with pytest.raises(EngineUnavailable):
        local.client().health()
    assert not (local.folder / "engine.lock").exists()


def test_a_token_count_starts_an_engine_and_generates_nothing(local: Any, request_of: Any) -> None:
    client = local.client()
    request = request_of("text")
    assert client.count(request) == len(request.prompt.split())
    assert client.cache_report()["finished"] == []


def test_the_client_reads_state_and_clears_caches(client: Any, request_of: Any, read: Any) -> None:
    read(client.submit(request_of("count 1 0", id="one")))
    assert client.health().models[0].model == "fake"
    assert b"mlx_provider_requests_received_total" in client.metrics()
    assert "one" in client.cache_report()["finished"]
    client.cache_clear()
    assert client.cache_report()["finished"] == []


def test_a_forked_child_uses_separate_connections(
    client: Any, request_of: Any, read: Any, text: Any
) -> None:
    generation = client.submit(request_of("count 60 0.01"))
    hear, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            told = text(read(client.submit(request_of("count 3 0"))))
            os.write(tell, told.encode())
        finally:
            os._exit(0)
    os.close(tell)
    with os.fdopen(hear, "rb") as report:
        assert report.read() == b"0 1 2 "
    os.waitpid(child, 0)
    assert text(read(generation)).split()[-1] == "59"
    assert text(read(client.submit(request_of("count 2 0")))) == "0 1 "
