"""Servers in processes of their own on 127.0.0.1, and measured requests to them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from mlx_provider.errors import EngineUnavailable, RequestFailed
from mlx_provider.gateway.foreground import END_SIGNALS
from mlx_provider_bench.model_speed import Answer, Messages
from ports import free_port

START_LIMIT = 300.0
"""Seconds for Python, MLX and the weights on a busy machine."""
STOP_LIMIT = 10.0
POLL = 0.2


@contextmanager
def started(
    name: str, command: Sequence[object], folder: Path, environment: Mapping[str, str], log: Path
) -> Iterator[str]:
    """The address of a server that answers; `command` is what stands behind Python. Raises
    `EngineUnavailable` with the log's last lines."""
    port = free_port()
    address = ["--host", "127.0.0.1", "--port", str(port), "--model", str(folder)]
    process = None
    try:
        with held(), log.open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, *map(str, command), *address],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends the server
                env=os.environ | {"HF_HUB_OFFLINE": "1"} | dict(environment),
            )
        url = f"http://127.0.0.1:{port}"
        _await_health(name, process, url, log)
        yield url
    finally:
        if process is not None:
            stop(process)


def stop(process: subprocess.Popen[Any], limit: float = STOP_LIMIT) -> None:
    """Kill a process that does not end. Idempotent."""
    process.terminate()
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _await_health(name: str, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(POLL)
    tail = log.read_text(errors="replace").splitlines()[-3:]
    raise EngineUnavailable(f"{name} does not come up: {' / '.join(tail)}")


@contextmanager
def held() -> Iterator[None]:
    """Signals wait until the clean-up knows a process that is being started."""
    received: list[int] = []

    def later(number: int, frame: FrameType | None) -> None:
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield  # which no signal interrupts
        return
    before = {number: signal.signal(number, later) for number in END_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


class Client:
    """A model of a proxy, asked by OpenAI's chat completions. Safe from several threads."""

    def __init__(self, name: str, url: str, key: str, limit: float) -> None:
        """`limit`: seconds for each request, to its last byte."""
        self.name = name
        self.limit = limit
        self._http = httpx.Client(
            base_url=url, headers={"authorization": f"Bearer {key}"}, trust_env=False
        )

    def close(self) -> None:
        self._http.close()

    def ask(self, messages: Messages, max_tokens: int) -> Answer:
        """Greedy. Raises `RequestFailed` with the server's message."""
        body = {
            "model": self.name,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began, first, text, usage = time.perf_counter(), None, "", dict[str, Any]()
        try:
            with self._http.stream(
                "POST", "/v1/chat/completions", json=body, timeout=self.limit
            ) as reply:
                if not reply.is_success:
                    raise RequestFailed(f"HTTP {reply.status_code}: {_message(reply.read())}")
                for event in _events(reply):
                    if time.perf_counter() > began + self.limit:
                        raise RequestFailed(f"no end within {self.limit:g} s")
                    usage = event.get("usage") or usage
                    if piece := "".join(map(_text, event.get("choices") or ())):
                        first = time.perf_counter() - began if first is None else first
                        text += piece
        except httpx.HTTPError as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
        total = time.perf_counter() - began
        details = usage.get("prompt_tokens_details") or {}
        tokens, prompt = usage.get("completion_tokens") or 0, usage.get("prompt_tokens") or 0
        cached = details.get("cached_tokens") or 0
        first = total if first is None else first
        return Answer(first, total, tokens, prompt, cached=cached, text=text)

    def together(
        self, prompts: Sequence[Messages], max_tokens: int, *, apart: float = 0.0
    ) -> list[Answer]:
        """All at once, or `apart` seconds after one another; answers in order."""

        def one(at: int, messages: Messages) -> Answer:
            time.sleep(at * apart)
            began = time.perf_counter()
            try:
                return self.ask(messages, max_tokens)
            except RequestFailed as error:
                spent = time.perf_counter() - began
                return Answer(spent, spent, 0, 0, failure=error.message[:200])

        pool = ThreadPoolExecutor(max(1, len(prompts)))
        try:
            return list(pool.map(one, range(len(prompts)), prompts))
        finally:  # a signal ends the wait at once; the requests end with their server
            pool.shutdown(wait=False, cancel_futures=True)

    def alone(self, prompts: Sequence[Messages], max_tokens: int) -> list[Answer]:
        return [self.together([messages], max_tokens)[0] for messages in prompts]


def _events(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in reply.iter_lines():
        if line.startswith("data:") and not line.endswith("[DONE]"):
            event = json.loads(line[5:])
            if event.get("error"):
                raise RequestFailed(str(event["error"])[:300])
            yield event


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return f"{thought}{delta.get('content') or ''}"


def _message(body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body.decode(errors="replace")
    return (str(message).strip().splitlines() or ["nothing"])[0][:300]
