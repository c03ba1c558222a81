"""The command line of the benchmarks, in a process of its own or in this one; a fake server."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

ROOT = Path(__file__).parents[2]
Bench = Callable[..., dict[str, Any]]


def from_process(*command: str) -> Bench:
    """The JSON line that a command writes in a fresh process."""

    def run(*arguments: str) -> dict[str, Any]:
        path = os.pathsep.join([str(ROOT), str(ROOT / "plugins"), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, *command, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            timeout=300,
            env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        )
        assert done.returncode == 0
        return result_of(done.stdout)

    return run


@pytest.fixture
def bench() -> Bench:
    """`mlx-provider bench ...`"""
    return from_process("-c", "from mlx_provider.cli import main; main()", "bench")


@pytest.fixture
def benchmark() -> Bench:
    """`python tests/benchmarks ...`"""
    return from_process(str(ROOT / "tests" / "benchmarks"))


def result_of(told: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(told.splitlines()[-1])
    (about,) = [run["machine"] for run in result.get("runs", [{"machine": result}])]
    assert {"device", "blas", "cores", "load_average"} <= about.keys()
    return result


@pytest.fixture(scope="session")
def small() -> tuple[str, ...]:
    """Sizes that take no time."""
    return ("--hidden", "64", "--layers", "3")


class FakeServer(ThreadingHTTPServer):
    """OpenAI's chat completions, by hand. What it does wrong follows from the model's name.

    `right` answers words that follow from the messages, as `slow` does in its time. In company
    `wrong` answers others, `refuses` has room for two, `topples` breaks every stream off at a bad
    request, `stalls` waits while a long prompt is there. `silent` never answers, `dribbles` never
    ends, `forgets` answers differently each time.
    """

    daemon_threads = True
    models: ClassVar[Any] = {"data": [{"id": "right"}]}
    WAIT = 0.4
    """Seconds by which `stalls` is late."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeRequest)
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.running = self.long = self.longs = self.seen = self.toppled = 0
        self.may_end: Callable[[FakeRequest], bool] = lambda request: True
        """Before this holds, no stream says its last word."""
        self.keys: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class FakeRequest(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._whole(200, self.server.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        fake, self.model, messages = self.server, body["model"], body["messages"]
        with fake.lock:
            fake.seen += 1
            self.number = fake.seen
            fake.keys.add(self.headers.get("authorization", ""))
            self.company, self.toppled = fake.running > 0, fake.toppled
            crowded, long = fake.running >= 2, len(str(messages)) > 1500
            self.longs = fake.longs
            fake.running, fake.long = fake.running + 1, fake.long + long
            fake.longs += long
        try:
            if not messages:
                fake.toppled += 1
                self._whole(400, {"error": {"message": "no messages"}})
            elif self.model == "refuses" and crowded:
                self._whole(429, {"error": {"message": "no room"}})
            elif self.model == "silent":
                fake.over.wait()
            else:
                self._answer(body, long)
        except OSError:
            pass  # the client has left
        finally:
            with fake.lock:
                fake.running, fake.long = fake.running - 1, fake.long - long

    def _answer(self, body: dict[str, Any], long: bool) -> None:
        words = self._words(body)
        if not body.get("stream"):
            message = {"role": "assistant", "content": "".join(words)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            self._whole(200, {"id": "1", "object": "chat.completion", "choices": [choice]})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        if long and self.model == "stalls":
            time.sleep(self.server.WAIT)
        for at, word in enumerate(words):
            while at == len(words) - 1 and not self.server.may_end(self):
                time.sleep(0.01)
            if self.model == "topples" and self.server.toppled > self.toppled:
                self._event({"error": {"message": "the batch was closed"}})
                return
            while self.model == "stalls" and self.server.long and not long:
                time.sleep(0.01)
            time.sleep(0.015 if self.model == "slow" else 0.005)
            self._event({"choices": [{"index": 0, "delta": {"content": word}}]})
        while self.model == "dribbles" and not self.server.over.wait(0.05):
            self.wfile.write(b": ping\n\n")
            self.wfile.flush()
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        usage = {"prompt_tokens": 9, "completion_tokens": len(words), "total_tokens": 9}
        usage["prompt_tokens_details"] = {"cached_tokens": 5}
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _words(self, body: dict[str, Any]) -> list[str]:
        told = json.dumps(body["messages"])
        if (self.model == "wrong" and self.company) or self.model == "forgets":
            told += str(self.server.seen)
        digits = hashlib.sha256(told.encode()).hexdigest()
        return [f" {each}" for each in digits[: body.get("max_tokens", 8)]]

    def _event(self, event: dict[str, Any]) -> None:
        head = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": self.model}
        self.wfile.write(f"data: {json.dumps(head | event)}\n\n".encode())
        self.wfile.flush()

    def _whole(self, status: int, content: Any) -> None:
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.over.set()
    server.shutdown()
    thread.join()
    server.server_close()
