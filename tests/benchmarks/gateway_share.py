"""The engine alone and through LiteLLM, and our share of its work.

The same questions are asked of one engine over its socket and through a proxy in turn: tokens per
second of all streams, and time to first token. What a token costs the proxy is its processor time;
what of that is ours is measured in this process, which reads the same replies by the same code and
nothing of LiteLLM's around it. Chunks are objects of LiteLLM's classes, which any provider makes:
what making them takes is LiteLLM's, and found by making each a second time, in the same place.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from mlx_provider.client.generation import EngineClient
from mlx_provider.gateway.config import proxy_config
from mlx_provider.gateway.engine import gateway_apart
from mlx_provider.gateway.proxy import Proxy
from mlx_provider.protocol.requests import GenerateRequest, Sampling
from mlx_provider_bench.report import Result, against, print_rows, surroundings
from peers import HELLO, Run, through_proxy
from servers import Answer, Client, Messages, Server
from stories import ask_all, short_stories

NAME = "measured"
FEW = 8
"""Requests that a turn should have: with fewer, more turns count."""
SHARE = 0.15
"""Of LiteLLM's own time for a token that ours may be."""


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    model: str = "demo"
    streams: Sequence[int] = (1, 8, 32)
    reply: int = 200
    rounds: int = 3


@dataclass(frozen=True)
class Turn:
    """One round of one side."""

    run: Run
    cpu: float
    """Seconds of processor time: of the proxy, or of this process."""


def per_token(turns: Sequence[Turn]) -> float:
    """Seconds of processor time for a token of all of them."""
    tokens = sum(answer.tokens for turn in turns for answer in turn.run.answers)
    return sum(turn.cpu for turn in turns) / max(1, tokens)


def bench(plan: Plan) -> Result:
    """Run the plan; JSON-able. A table goes to stderr."""
    result = surroundings("float32") | {"model": plan.model}
    environ = {**os.environ, "MLX_PROVIDER_IDLE_TIMEOUT": "600"}
    with gateway_apart(proxy_config(NAME, plan.model), environ) as apart:
        engine, proxy = apart.engine, apart.proxy
        proxy.wait_ready()
        server = Server(through_proxy(NAME), proxy.url, Path(), proxy.key, alias=NAME)
        client = Client(server)
        client.ask(HELLO, 4)
        result["rows"] = [_row(plan, count, engine, proxy, client) for count in plan.streams]
        client.close()
    print_rows("the engine alone, and through LiteLLM", _TABLE, result["rows"])
    return result


def _row(plan: Plan, count: int, engine: EngineClient, proxy: Proxy, client: Client) -> Result:
    once, twice, through = [], [], []
    for turn in range(1 + plan.rounds * max(1, FEW // count)):
        asked = short_stories(count, turn)
        each = _alone(engine, plan, asked), _alone(engine, plan, asked, again=True)
        proxied = _through(proxy, client, plan, asked)
        if turn:  # the first one has loaded what there is to load
            once.append(each[0])
            twice.append(each[1])
            through.append(proxied)
    objects = max(0.0, per_token(twice) - per_token(once))
    ours, whole = max(0.0, per_token(once) - objects), per_token(through)
    pairs = list(zip(once, through, strict=True))
    return {
        "streams": count,
        "alone": median(turn.run.rate for turn in once),
        "through": median(turn.run.rate for turn in through),
        "ratio": median(through.run.rate / alone.run.rate for alone, through in pairs),
        "later": median(through.run.first - alone.run.first for alone, through in pairs),
        "proxy_us": 1e6 * whole,
        "objects_us": 1e6 * objects,
        "ours_us": 1e6 * ours,
        "share": against(ours / max(whole - ours, 1e-9), SHARE, at_least=False),
    }


def _through(proxy: Proxy, client: Client, plan: Plan, asked: Sequence[Messages]) -> Turn:
    cpu = cpu_seconds(proxy.process.pid)
    run = ask_all(client, asked, plan.reply)
    return Turn(run, cpu_seconds(proxy.process.pid) - cpu)


def _alone(
    engine: EngineClient, plan: Plan, asked: Sequence[Messages], again: bool = False
) -> Turn:
    """Read as the handler does. `again`: the objects of each chunk are made twice."""

    async def read() -> list[Answer]:
        return list(await asyncio.gather(*(_read(engine, plan, each, again) for each in asked)))

    cpu, began = time.process_time(), time.perf_counter()
    with asyncio.Runner(loop_factory=_proxys_loop()) as runner:
        answers = runner.run(read())
    return Turn(Run(answers, time.perf_counter() - began), time.process_time() - cpu)


async def _read(engine: EngineClient, plan: Plan, messages: Messages, again: bool) -> Answer:
    from mlx_provider.litellm.call import Deadline
    from mlx_provider.litellm.streams import SILENCE, Reply, ReplyStream

    request = GenerateRequest(
        model=plan.model,
        messages=list(messages),
        max_tokens=plan.reply,
        sampling=Sampling(temperature=0),
    )
    began, first, text, tokens = time.perf_counter(), 0.0, "", 0
    generation = await asyncio.to_thread(engine.submit, request)
    reply = Reply(generation, Deadline(None, None), plan.model)
    async for chunk in ReplyStream(reply, SILENCE):
        for choice in chunk.choices:
            if choice.delta.content and not text:
                first = time.perf_counter() - began
            text += choice.delta.content or ""
        if again:
            _made(chunk)
        usage: Any = getattr(chunk, "usage", None)
        tokens = usage.completion_tokens if usage is not None else tokens
    total = time.perf_counter() - began
    return Answer(text, first or total, total, tokens, 0)


def _made(chunk: Any) -> None:
    from litellm.types.utils import Delta, ModelResponseStream, StreamingChoices

    choices = [
        StreamingChoices(index=each.index, delta=Delta(content=each.delta.content))
        for each in chunk.choices
    ]
    ModelResponseStream(id=chunk.id, created=chunk.created, model=chunk.model, choices=choices)


def _proxys_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What uvicorn takes for the proxy."""
    try:
        import uvloop
    except ImportError:
        return None
    made: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return made


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far: by hundredths on Linux and macOS."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        told = subprocess.run(
            ["ps", "-o", "cputime=", "-p", str(pid)], capture_output=True, text=True, check=True
        )
        parts = [float(part) for part in told.stdout.replace("-", ":").strip().split(":")]
        return float(sum(part * 60.0**at for at, part in enumerate(reversed(parts[-3:]))))
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


_TABLE = {
    "streams": "streams",
    "alone tok/s": "alone",
    "through": "through",
    "ratio": "ratio",
    "first token later, s": "later",
    "proxy µs/token": "proxy_us",
    "objects": "objects_us",
    "ours": "ours_us",
    "ours over LiteLLM's": "share",
}
