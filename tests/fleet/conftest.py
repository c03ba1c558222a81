"""Two engines on TCP, two proxies of the page's configuration, a Redis: all of them processes."""

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from .fleet_processes import ENGINES, KEY, Proxy, Redis, TcpEngine, written

LIMIT = 120.0
"""Seconds without a byte after which a request counts as stuck."""
SYSTEM = {"role": "system", "content": "You are an agent that answers briefly. " * 40}
StartFleet = Callable[..., "RunningFleet"]


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.fleet)


@dataclass
class Told:
    """What a client got."""

    engine: str = ""
    """The id of the one that answered."""
    text: str = ""
    finish: str = ""
    error: str = ""
    status: int = 200
    prompt: int = 0
    cached: int = 0
    seconds: float = 0.0
    """Until the first byte of the answer."""

    @property
    def whole(self) -> bool:
        return self.status == 200 and not self.error and bool(self.finish)


@dataclass
class RunningFleet:
    """All of it; proxies take turns."""

    engines: dict[str, TcpEngine]
    """By id."""
    proxies: list[Proxy]
    asked: int = field(default=0)

    def ask(self, messages: list[dict[str, str]], session: str = "", **more: Any) -> Told:
        """A streamed request, read to its end, of the next proxy."""
        self.asked += 1
        proxy = self.proxies[self.asked % len(self.proxies)]
        body = {"model": "demo", "max_tokens": 8, "temperature": 0, "stream": True, **more}
        body |= {"messages": messages, "stream_options": {"include_usage": True}}
        headers = {"authorization": f"Bearer {KEY}"}
        headers |= {"x-litellm-session-id": session} if session else {}
        told, began = Told(), time.monotonic()
        with (
            httpx.Client(trust_env=False, timeout=LIMIT) as http,
            http.stream(
                "POST", f"{proxy.url}/v1/chat/completions", json=body, headers=headers
            ) as reply,
        ):
            told.seconds = time.monotonic() - began
            told.status = reply.status_code
            told.engine = reply.headers.get("x-litellm-model-id", "")
            if not reply.is_success:
                told.error = reply.read().decode()
                return told
            for line in reply.iter_lines():
                if line.startswith("data:") and not line.endswith("[DONE]"):
                    _take(told, json.loads(line[5:]))
        return told


def _take(told: Told, event: dict[str, Any]) -> None:
    told.error = json.dumps(event["error"]) if event.get("error") else told.error
    for choice in event.get("choices") or ():
        told.text += (choice.get("delta") or {}).get("content") or ""
        told.finish = choice.get("finish_reason") or told.finish
    if usage := event.get("usage"):
        told.prompt = usage["prompt_tokens"]
        told.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


class Session:
    """An agent's conversation, which grows by a turn at a time."""

    def __init__(self, number: int) -> None:
        self.messages = [SYSTEM]
        self.number = number
        self.turns: list[Told] = []

    def turn(self, fleet: RunningFleet, **more: Any) -> Told:
        """One more question; an answer that was not whole is asked for again with the next."""
        asked = {"role": "user", "content": f"Question {self.number}.{len(self.turns)}, please?"}
        told = fleet.ask([*self.messages, asked], f"session-{self.number}", **more)
        self.turns.append(told)
        if told.whole:
            self.messages += [asked, {"role": "assistant", "content": told.text}]
        return told


@pytest.fixture(scope="session")
def session() -> type[Session]:
    return Session


@pytest.fixture(scope="module")
def start_fleet() -> Iterator[StartFleet]:
    """`start_fleet(...)`: two engines with these variables, and proxies with a routing strategy."""
    root = Path(tempfile.mkdtemp(prefix="mlxp-fleet-"))
    with ExitStack() as ending:
        ending.callback(shutil.rmtree, root, ignore_errors=True)

        def start(
            proxies: int = 2, redis: bool = True, strategy: str = "", **environ: str
        ) -> RunningFleet:
            engines = [TcpEngine(root / f"engine-{n}", environ, DRAIN) for n in (1, 2)]
            variables = {f"ENGINE_{n}_KEY": each.key for n, each in enumerate(engines, 1)}
            config = deepcopy(ENGINES)
            for entry, engine in zip(config["model_list"], engines, strict=True):
                entry["litellm_params"]["api_base"] = engine.url
            if strategy:
                config["router_settings"]["routing_strategy"] = strategy
            if redis:
                shared = Redis(root / "redis")
                ending.callback(shared.end)
                shared.start()
                variables |= {"REDIS_URL": shared.url, "REDIS_SOCKET_TIMEOUT": "2"}
            else:
                del config["router_settings"]["redis_url"]
            behind = [Proxy(written(root / "proxy", config), variables) for _ in range(proxies)]
            for each in (*engines, *behind):
                ending.callback(each.end)
                each.start()
            for each in (*engines, *behind):
                each.wait()
            names = [entry["model_info"]["id"] for entry in config["model_list"]]
            return RunningFleet(dict(zip(names, engines, strict=True)), behind)

        yield start


DRAIN = ("--drain", "60")
