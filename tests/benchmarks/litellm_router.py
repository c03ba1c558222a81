"""What a choice costs LiteLLM's router, by the engines of a name.

The router is the real one, of a config that `init --engine` writes, with our hook. Nobody is
asked: it only chooses, for sessions that it does not know and for those that it has pinned.
"""

from __future__ import annotations

import asyncio
import os
import time
import tracemalloc
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from imagined_device import without_device
from mlx_provider.errors import BadRequest
from mlx_provider.gateway.config import Served
from mlx_provider.gateway.fleet import REDIS, Fleet, fleet_config
from mlx_provider_bench.report import Result, print_rows

NAME = "m"
PATIENCE = 5.0
"""Seconds in which a Redis has to answer."""
FEW = 2
"""Engines of the router that loads what all share."""


@dataclass(frozen=True)
class Plan:
    engines: Sequence[int] = (10, 100, 1000)
    sessions: int = 300
    """Each of which asks twice."""
    redis: str | None = None


def bench(plan: Plan) -> Result:
    """Run the plan; JSON-able. A table goes to stderr. Raises `BadRequest` where a Redis
    does not answer."""
    import mlx_provider.litellm  # noqa: F401  (our hook)

    if plan.redis is not None:
        _reach(plan.redis)
    with _environment(plan.redis):
        asyncio.run(_row(FEW, plan))
        rows = [asyncio.run(_row(count, plan)) for count in plan.engines]
    for row in rows:
        row["of_first"] = round(row["pinned_ms"] / rows[0]["pinned_ms"], 2)
    print_rows("LiteLLM's router", COLUMNS, rows)
    return without_device() | {"plan": vars(plan) | {"redis": plan.redis is not None}, "rows": rows}


COLUMNS = {
    "engines": "engines",
    "router made, s": "made_s",
    "bytes for each": "engine_bytes",
    "choice, new session, ms CPU": "new_ms",
    "pinned session, ms CPU": "pinned_ms",
    "of the first row": "of_first",
    "bytes for each session": "session_bytes",
    "items kept in memory": "items",
}


def _reach(url: str) -> None:
    """LiteLLM does without a Redis that is gone, and would be measured so."""
    from redis import Redis
    from redis.exceptions import RedisError

    try:
        Redis.from_url(url, socket_timeout=PATIENCE, socket_connect_timeout=PATIENCE).ping()
    except (RedisError, ValueError) as error:
        raise BadRequest(f"no Redis answers: {error}", param="redis") from None


@contextmanager
def _environment(redis: str | None) -> Iterator[None]:
    """The variable that the config names."""
    before = os.environ.get(REDIS)
    if redis is not None:
        os.environ[REDIS] = redis
    try:
        yield
    finally:
        if redis is not None:
            os.environ.pop(REDIS)
        if before is not None:
            os.environ[REDIS] = before


async def _row(count: int, plan: Plan) -> Result:
    began = time.process_time()
    router = _router(count, plan.redis)
    made = time.process_time() - began
    new = await _cpu(lambda: _choices(router, count, plan.sessions))
    pinned = await _cpu(lambda: _choices(router, count, plan.sessions))
    row = {
        "engines": count,
        "made_s": round(made, 3),
        "new_ms": round(1e3 * new / plan.sessions, 3),
        "pinned_ms": round(1e3 * pinned / plan.sessions, 3),
        "items": router.cache.in_memory_cache.max_size_in_memory,
        "session_bytes": await _bytes(lambda: _pins(router, plan.sessions)) // plan.sessions,
    }
    router.discard()
    tracemalloc.start()
    router = _router(count, plan.redis)
    row["engine_bytes"] = tracemalloc.get_traced_memory()[0] // count
    tracemalloc.stop()
    router.discard()
    return row


def _router(count: int, redis: str | None) -> Any:
    import litellm

    fleet = Fleet(tuple(f"http://mac-{n}.invalid:8080" for n in range(count)), redis=redis)
    config = fleet_config(Served(NAME, "some/model", 32_768, 1024), fleet, names=())
    settings = dict(config["router_settings"])
    if redis is not None:
        settings["redis_url"] = redis
    return litellm.Router(model_list=config["model_list"], **settings)


async def _cpu(work: Callable[[], Coroutine[Any, Any, None]]) -> float:
    """Seconds that it computes."""
    began = time.process_time()
    await work()
    return time.process_time() - began


async def _bytes(work: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Bytes that are held once it is done."""
    tracemalloc.start()
    await work()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held


async def _choices(router: Any, engines: int, sessions: int) -> None:
    """Of sessions that no router of another row has pinned in a Redis that they share."""
    for number in range(sessions):
        session = f"{engines}-{number}"
        request = {"metadata": {"session_id": session}}
        messages = [{"role": "user", "content": "hello"}]
        chosen = await router.async_get_available_deployment(NAME, request, messages)
        await _pin(router, session, chosen["model_info"])


async def _pins(router: Any, sessions: int) -> None:
    """Pins alone, of sessions that are not there."""
    for number in range(sessions):
        await _pin(router, f"another-{number}", {"id": f"{NAME} on mac-{number}.invalid:8080"})


async def _pin(router: Any, session: str, engine: dict[str, Any]) -> None:
    """As LiteLLM does before it calls the engine."""
    from litellm.router_utils.pre_call_checks.deployment_affinity_check import (
        DeploymentAffinityCheck,
    )

    metadata = {"deployment_model_name": NAME, "session_id": session}
    for callback in router.optional_callbacks or ():
        if isinstance(callback, DeploymentAffinityCheck):
            call = {"metadata": metadata, "model_info": engine}
            await callback.async_pre_call_deployment_hook(call, None)
