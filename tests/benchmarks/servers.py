"""Servers in processes of their own on 127.0.0.1, and measured requests to them."""

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import httpx

from mlx_provider.config import PREFIX
from mlx_provider.errors import EngineUnavailable, RequestFailed
from mlx_provider.gateway.foreground import PASSED_ON
from ports import free_port

Messages = Sequence[dict[str, Any]]
T = TypeVar("T")
START_LIMIT = 300.0
"""Seconds for Python, MLX and the weights on a busy machine."""
STOP_LIMIT = 10.0
POLL = 0.2
TIMEOUT = 1800.0
"""Seconds for a request, to its last byte."""


@dataclass(frozen=True)
class Piece:
    text: str = ""
    tokens: int = 0
    cached: int = 0
    prompt: int = 0


@dataclass(frozen=True)
class Kind:
    """How a server is started, asked and read."""

    name: str
    command: tuple[str, ...]
    """Behind Python; address and model follow."""
    request: Callable[[str, Messages, int], tuple[str, dict[str, Any]]]
    """(model, messages, most tokens) -> path and body."""
    read: Callable[[Iterator[str]], Iterator[Piece]]
    """Lines of the reply."""
    environment: Mapping[str, str] = field(default_factory=dict)
    images: bool = True
    takes_model: bool = True


@dataclass(frozen=True)
class Server:
    kind: Kind
    url: str
    folder: Path
    key: str
    alias: str = ""
    """The name of the model; unset: the path of its folder."""

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    @property
    def model(self) -> str:
        return self.alias or str(self.folder)


class Kept:
    def __init__(self, kind: Kind, folder: Path, log: Path) -> None:
        self.kind = kind
        self._log = log
        self.process: subprocess.Popen[bytes] | None = None
        url, key = f"http://127.0.0.1:{free_port()}", secrets.token_urlsafe()
        self.server = Server(kind, url, folder, key)

    def start(self) -> Server:
        """Returns once it answers. Raises `EngineUnavailable` with the log's last lines."""
        kind, folder = self.kind, self.server.folder
        own = {PREFIX + "API_KEY": self.server.key, PREFIX + "MODEL_ROOTS": str(folder)}
        with held(), self._log.open("ab") as out:
            self.process = subprocess.Popen(
                [*self.command(), *self._arguments()],
                stdin=self.stdin,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends the server
                env=os.environ | {"HF_HUB_OFFLINE": "1"} | own | dict(kind.environment),
            )
        try:
            _await_health(self.process, self.server, self._log)
        except EngineUnavailable:
            self.stop()
            raise
        return self.server

    stdin = subprocess.DEVNULL

    def command(self) -> list[str]:
        return [sys.executable, *self.kind.command]

    def _arguments(self) -> list[str]:
        port = self.server.url.rpartition(":")[2]
        model = ["--model", str(self.server.folder)] if self.kind.takes_model else []
        return ["--host", "127.0.0.1", "--port", port, *model]

    @property
    def death(self) -> str:
        code = None if self.process is None else self.process.poll()
        return "" if code is None else _ended(code)

    def stop(self) -> None:
        if self.process is not None:
            stop(self.process)


def _ended(code: int) -> str:
    return f"its process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"


def stop(process: subprocess.Popen[Any], limit: float = STOP_LIMIT) -> None:
    """Kill a process that does not end. Idempotent."""
    process.terminate()
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _await_health(process: subprocess.Popen[bytes], server: Server, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            address = server.url + "/health"
            if httpx.get(address, headers=server.headers, timeout=5).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(POLL)
    tail = log.read_text(errors="replace").splitlines()[-3:]
    raise EngineUnavailable(f"{server.kind.name} does not come up: {' / '.join(tail)}")


@contextmanager
def held() -> Iterator[None]:
    """Signals wait until the clean-up knows a process that is being started."""
    received: list[int] = []

    def later(number: int, frame: FrameType | None) -> None:
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield  # which no signal interrupts
        return
    before = {number: signal.signal(number, later) for number in PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


@dataclass(frozen=True)
class Answer:
    """Times in seconds since the request was sent."""

    text: str
    first: float
    """Until the first text; until the end if there was none."""
    total: float
    tokens: int
    cached: int
    """Prompt tokens that the server reports as cached, or 0."""
    failure: str = ""
    prompt: int = 0
    times: tuple[float, ...] = ()
    late: bool = False

    @property
    def pace(self) -> float:
        return (self.tokens - 1) / max(1e-9, self.total - self.first)


class TooLate(RequestFailed):
    """The reply did not end in time."""


class Client:
    """Safe from several threads."""

    def __init__(
        self, server: Server, said: Mapping[str, Any] | None = None, limit: float = TIMEOUT
    ) -> None:
        """`said`: further fields of each request. `limit`: seconds for each request."""
        self.server = server
        self._said = said or {}
        self._limit = limit
        self._http = httpx.Client(
            base_url=server.url, headers=server.headers, timeout=limit, trust_env=False
        )

    def close(self) -> None:
        self._http.close()

    def ask(
        self, messages: Messages, max_tokens: int, heard: Callable[[], bool] = lambda: True
    ) -> Answer:
        """Greedy reply. `heard` is called for each piece of text; if it returns False, the
        connection is closed. Raises `RequestFailed` with the server's message, `TooLate`."""
        kind = self.server.kind
        path, body = kind.request(self.server.model, messages, max_tokens)
        body |= self._said
        text, tokens, cached, prompt, times = "", 0, 0, 0, []
        began = time.perf_counter()
        try:
            with self._http.stream("POST", path, json=body) as reply:
                if not reply.is_success:
                    raise RequestFailed(f"HTTP {reply.status_code}: {_error_line(reply.read())}")
                for piece in kind.read(_lines(reply, began + self._limit)):
                    if piece.text:
                        times.append(time.perf_counter() - began)
                    text += piece.text
                    tokens, cached = piece.tokens or tokens, piece.cached or cached
                    prompt = piece.prompt or prompt
                    if piece.text and not heard():
                        break
        except httpx.TimeoutException as error:
            raise TooLate(f"no answer within {self._limit:g} s") from error
        except httpx.HTTPError as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
        total = time.perf_counter() - began
        first = times[0] if times else total
        return Answer(text, first, total, tokens, cached, prompt=prompt, times=tuple(times))

    def try_ask(
        self, messages: Messages, max_tokens: int, heard: Callable[[], bool] = lambda: True
    ) -> Answer:
        began = time.perf_counter()
        try:
            return self.ask(messages, max_tokens, heard)
        except RequestFailed as error:
            spent, late = time.perf_counter() - began, isinstance(error, TooLate)
            return Answer("", spent, spent, 0, 0, failure=error.message[:200], late=late)

    def ask_together(
        self,
        prompts: Sequence[Messages],
        max_tokens: int,
        *,
        apart: float = 0.0,
        heard: Callable[[], bool] = lambda: True,
    ) -> list[Answer]:
        """All at once, or `apart` seconds after one another; answers in order."""

        def one(at: int, messages: Messages) -> Answer:
            time.sleep(at * apart)
            return self.try_ask(messages, max_tokens, heard)

        return at_once([partial(one, at, messages) for at, messages in enumerate(prompts)])


def at_once(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Each in its own thread, results in order. A signal ends the wait at once; the requests end
    with their server."""
    pool = ThreadPoolExecutor(max(1, len(tasks)))
    try:
        return [each.result() for each in [pool.submit(task) for task in tasks]]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _lines(reply: httpx.Response, deadline: float) -> Iterator[str]:
    """Lines of a stream, which must end in time even if bytes never stop."""
    rest = ""
    for text in reply.iter_text():
        if time.perf_counter() > deadline:
            raise TooLate("bytes come, and no end in the time that was allowed")
        *lines, rest = (rest + text).split("\n")
        yield from (line.rstrip("\r") for line in lines)
    if rest:
        yield rest


def _error_line(body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body.decode(errors="replace")
    return (str(message).strip().splitlines() or ["nothing"])[0][:300]
