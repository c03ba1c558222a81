"""Proxies with several workers: what restarts cost, and a crowd of which many leave for minutes."""

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from mlx_provider.cli.engine import stop
from mlx_provider.gateway.proxy import Proxy

LIMIT = 120.0
"""Seconds without a byte after which a request counts as stuck."""


@dataclass
class Told:
    """What a client got."""

    text: str = ""
    finish: str = ""
    error: str = ""
    status: int = 200


def chat(question: str, **more: Any) -> dict[str, Any]:
    """A greedy request's body."""
    messages = [{"role": "user", "content": question}]
    return {"model": "demo", "messages": messages, "temperature": 0, "stream": True, **more}


@contextmanager
def reading(proxy: Proxy, body: dict[str, Any]) -> Iterator[Iterator[Told]]:
    """What was told so far, after each event."""
    headers = {"authorization": f"Bearer {proxy.key}"}
    told = Told()
    with (
        httpx.Client(trust_env=False, timeout=LIMIT) as http,
        http.stream(
            "POST", f"{proxy.url}/v1/chat/completions", json=body, headers=headers
        ) as reply,
    ):
        told.status = reply.status_code
        yield _events(reply, told)


def ask(proxy: Proxy, body: dict[str, Any], leave_after: int | None = None) -> Told:
    """Read to the end, or so many events. Raises `httpx.HTTPError`."""
    told = Told()
    with reading(proxy, body) as events:
        for count, each in enumerate(events, 1):
            told = each
            if count == leave_after:
                break
    return told


def _events(reply: httpx.Response, told: Told) -> Iterator[Told]:
    if not reply.is_success:
        told.error = reply.read().decode()
        yield told
        return
    for line in reply.iter_lines():
        if not line.startswith("data:") or line.endswith("[DONE]"):
            continue
        event = json.loads(line[5:])
        if event.get("error"):
            told.error = json.dumps(event["error"])
        for choice in event.get("choices") or ():
            told.text += (choice.get("delta") or {}).get("content") or ""
            told.finish = choice.get("finish_reason") or told.finish
        yield told


# -- restarts

SERVERS = {"uvicorn": (), "gunicorn": ("--run_gunicorn",), "granian": ("--run_granian",)}
WORKERS = ("--num_workers", "2", "--timeout_worker_healthcheck", "60")
STORY = chat("Tell me a story.", min_tokens=600, max_tokens=600)
ANSWER = chat("What is the capital of France?")


@pytest.mark.parametrize("server", SERVERS)
def test_a_rolling_restart_of_the_proxy_loses_no_stream(server, start, engine):
    """The old proxy ends its streams before it goes, while the new one takes what comes."""
    before = engine.health().pid
    whole = ask(start(), STORY).text
    old = start(*SERVERS[server], *WORKERS)
    with ThreadPoolExecutor(8) as pool:
        assert {told.status for told in pool.map(lambda _: ask(old, ANSWER), range(16))} == {200}
    new = start(*SERVERS[server], *WORKERS)
    begun, found = threading.Event(), Told()

    def read() -> Told:
        with reading(old, STORY) as events:
            next(events)
            begun.set()
            return list(events)[-1]

    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(read)
        assert begun.wait(60)
        old.process.terminate()
        assert "Paris" in ask(new, ANSWER).text
        found = stream.result()
    assert (found.text, found.finish, found.error) == (whole, "length", "")
    old.process.wait(60)
    assert engine.health().pid == before


def test_requests_during_an_engine_restart_get_503_with_retry_after(start, engine):
    proxy = start(*WORKERS)
    before = engine.health().pid
    headers = {"authorization": f"Bearer {proxy.key}"}
    whole = {**STORY, "stream": False}
    with ThreadPoolExecutor(1) as pool, reading(proxy, STORY) as events:
        url = f"{proxy.url}/v1/chat/completions"
        beside = pool.submit(
            httpx.post, url, json=whole, headers=headers, timeout=LIMIT, trust_env=False
        )
        next(events)
        deadline = time.monotonic() + LIMIT
        while len(engine.stats().requests) < 2:
            assert time.monotonic() < deadline, "the story ended before the other one began"
            time.sleep(0.05)
        stop(idle=False)
        told = list(events)[-1]
    assert "engine" in told.error
    assert told.finish != "length"
    assert beside.result().status_code == 503
    assert beside.result().headers["retry-after"] == "1"
    assert "Paris" in ask(proxy, ANSWER).text
    assert engine.health().pid != before


# -- a crowd

SECONDS = float(os.environ.get("SOAK_SECONDS", "300"))
STREAMS, KILLS = 32, 3
LEAVING = 0.3
"""Share of the requests whose client leaves before the end."""
ENGINE_LOST = ("engine", "Engine")
QUESTIONS = [
    *(f"What is the capital of {name}?" for name in ("France", "Japan", "Cuba", "Italy")),
    "Tell me a story.", "Tell me a story. Please.", "Hello!", "My name is Maria. What is my name?",
]  # fmt: skip


def bodies() -> list[dict[str, Any]]:
    return [
        chat(question, max_tokens=most, **({"min_tokens": most} if most > 20 else {}))
        for question in QUESTIONS
        for most in (12, 80)
    ]


class Crowd:
    """Clients that ask again and again."""

    def __init__(self, proxy: Any, alone: dict[int, str]) -> None:
        self.proxy = proxy
        self.alone = alone
        self.over = threading.Event()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._lock = threading.Lock()

    def client(self, seed: int) -> None:
        dice = random.Random(seed)
        asked = bodies()
        while not self.over.is_set():
            at = dice.randrange(len(asked))
            leaves = dice.randint(1, 8) if dice.random() < LEAVING else None
            outcome = self.outcome(at, asked[at], leaves)
            with self._lock:
                self.counts[outcome] += 1

    def outcome(self, at: int, body: dict[str, Any], leaves: int | None) -> str:
        try:
            told = ask(self.proxy, body, leaves)
        except httpx.HTTPError as error:
            self.wrong.append(f"{type(error).__name__}: {error}")
            return "broken"
        if told.error:
            if not any(word in told.error for word in ENGINE_LOST):
                self.wrong.append(f"{told.status} {told.error[:300]}")
            return "refused"
        if leaves is not None:
            return "left"
        if told.text != self.alone[at]:
            self.wrong.append(f"{body['messages']}: {told.text!r}, alone {self.alone[at]!r}")
        return "answered"


def test_a_crowd_that_joins_and_leaves_gets_right_answers_despite_kills(start, engine, capsys):
    proxy = start(*WORKERS)
    alone = {at: ask(proxy, body).text for at, body in enumerate(bodies())}
    crowd = Crowd(proxy, alone)
    clients = [threading.Thread(target=crowd.client, args=(n,)) for n in range(STREAMS)]
    for each in clients:
        each.start()
    killed = set()
    for _ in range(KILLS):
        time.sleep(SECONDS / (KILLS + 1))
        pid = engine.health().pid
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
        time.sleep(5)
    time.sleep(SECONDS / (KILLS + 1))
    crowd.over.set()
    for each in clients:
        each.join(180)
    assert not [each for each in clients if each.is_alive()], "stuck"
    assert not crowd.wrong, crowd.wrong[:10]
    assert len(killed) == KILLS
    deadline = time.monotonic() + 30
    while (state := engine.health()).running or state.queued:
        assert time.monotonic() < deadline, "a slot is lost"
        time.sleep(0.2)
    with capsys.disabled():
        print(f"\n{SECONDS:g} s, {STREAMS} streams, {KILLS} kills: {dict(crowd.counts)}")
    assert crowd.counts["answered"] > crowd.counts["refused"] > 0
    assert crowd.counts["left"] > 0
