"""One rank of schedules: what a client of the service does, and what it gets.

    python schedule_rank.py SCHEDULES

SCHEDULES is a JSON file: `{"plays": [{"settings": {...}, "least": tokens, "do": [...]}],
"elsewhere": {rank: {folder: folder}}}`. Each play has a service of its own, with these settings,
whose rows share prefixes of so many tokens, or of as many as is measured. Under `mlx.launch`
rank 0 plays them over all ranks and the others follow; alone they are played in one process. Every
rank tells once, of every play: rank 0 what each request has got, the others what their engines
still hold in the end.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from few_passes import FEW
from mlx_provider.config import EngineSettings, engine_settings
from mlx_provider.engine.execution import calibration
from mlx_provider.engine.prefix_cache.reuse import Reuse
from mlx_provider.engine.scheduling.scheduler import Scheduler
from mlx_provider.errors import MLXProviderError
from mlx_provider.isolation import Isolation
from mlx_provider.protocol.event_queue import EventQueue
from mlx_provider.protocol.requests import EmbedRequest, GenerateRequest, ScoreRequest
from mlx_provider.registry import PluginRegistry
from mlx_provider.serving import engine_builder
from mlx_provider.serving.loader import Loader
from mlx_provider.serving.metrics import EngineMetrics
from mlx_provider.serving.service import ChatService
from mlx_provider_ranks import channel as channels
from mlx_provider_ranks.channel import FollowerChannel, LeaderChannel
from mlx_provider_ranks.follower import Follower
from mlx_provider_ranks.group import join
from mlx_provider_ranks.leader import ranks_of
from mlx_provider_ranks.messages import RankFault
from rank_group import tell
from replaced import Replaced, wrap

for name, value in FEW.items():
    setattr(calibration, name, value)

OTHERWISE: dict[str, Any] = {
    "kv_layout": "solo", "max_chunk": 8, "max_rows": 1, "memory_limit": 1_000_000,
    "output_reserve": 1, "prefix_bytes": 1, "stall_target": 1e-6, "feature_bytes": 1,
}  # fmt: skip
"""Settings of followers that are not to count."""
SLOW = 1e4
RANK = os.environ.get("MLX_RANK", "")
PLAYED: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
PATIENCE = 60.0
"""Seconds that a rank may be behind: the machine may be busy."""
LEAVES = 10.0
"""Seconds in which a rank ends that has lost another."""
STUCK = 600.0
"""Seconds without an event, or in one load, after which a rank says where it waits, and
ends: four ranks on two busy cores load for minutes."""
SOON = 60.0
"""Seconds in which a model leaves that nobody asks for."""


class Reader:
    """What one request has got so far."""

    def __init__(self) -> None:
        self.queue = EventQueue()
        self.got: dict[str, Any] = {"texts": {}, "thoughts": {}, "logprobs": {}, "finish": {}}
        self.tokens = 0
        self.ended = False

    def read(self, tokens: float) -> None:
        """Until the request has so many tokens, or its end."""
        while not self.ended and self.tokens < tokens:
            faulthandler.dump_traceback_later(STUCK, exit=True)
            for event in self.queue.get():
                getattr(self, f"_{event.type}")(event)

    def _accepted(self, event: Any) -> None:
        """Is returned by `submit`."""

    def _delta(self, event: Any) -> None:
        at, got = str(event.index), self.got
        got["texts"][at] = got["texts"].get(at, "") + event.content
        got["thoughts"][at] = got["thoughts"].get(at, "") + event.reasoning
        for each in event.logprobs:
            likely = [[top.id, top.logprob] for top in each.top]
            got["logprobs"].setdefault(at, []).append([each.id, each.logprob, likely])
        self.tokens += len(event.logprobs)

    def _embedded(self, event: Any) -> None:
        self.got.setdefault("vectors", []).append(event.vector)

    def _scored(self, event: Any) -> None:
        self.got.setdefault("scores", []).append(event.score)

    def _finish(self, event: Any) -> None:
        self.got["finish"][str(event.index)] = event.reason

    def _done(self, event: Any) -> None:
        self.got["usage"] = event.usage.model_dump()
        self.ended = True

    def _failed(self, event: Any) -> None:
        self.fail(event.error.code, event.error.message)

    def fail(self, code: str, message: str) -> None:
        self.got["failed"] = [code, message]
        self.ended = True


class Client:
    """Of one service."""

    def __init__(self, service: ChatService) -> None:
        self._service = service
        self._readers: dict[str, Reader] = {}
        self._does: dict[str, Callable[[dict[str, Any]], None]] = {
            "ask": self._ask,
            "cancel": lambda step: service.cancel(step["id"]),
            "clear": lambda step: service.cache_clear(),
            "read": self._read,
            "gone": self._gone,
        }

    def play(self, do: list[dict[str, Any]]) -> dict[str, Any]:
        for step in do:
            self._does[step["do"]](step)
        for reader in self._readers.values():
            reader.read(float("inf"))
        faulthandler.cancel_dump_traceback_later()
        return {"answers": {name: reader.got for name, reader in self._readers.items()}}

    def _ask(self, step: dict[str, Any]) -> None:
        reader = self._readers[step["id"]] = Reader()
        body = step["request"]
        kinds = {"input": EmbedRequest, "documents": ScoreRequest}
        kind = next((kinds[name] for name in kinds if name in body), GenerateRequest)
        faulthandler.dump_traceback_later(STUCK, exit=True)  # it may load a model
        try:
            self._service.submit(kind(id=step["id"], **body), reader.queue)
        except MLXProviderError as error:
            reader.fail(error.code, error.message)

    def _read(self, step: dict[str, Any]) -> None:
        self._readers[step["id"]].read(step.get("tokens", float("inf")))

    def _gone(self, step: dict[str, Any]) -> None:
        """Wait until a model has left the memory."""
        until = time.monotonic() + SOON
        while any(each.model == step["id"] for each in self._service.health().models):
            assert time.monotonic() < until, f"{step['id']} stays"
            time.sleep(0.05)


def play(one: dict[str, Any], make: Callable[[EngineSettings], ChatService]) -> dict[str, Any]:
    """What becomes of one play, and how it came to that."""
    happened: Counter[str] = Counter()
    with Replaced() as replaced:
        measured_as(replaced, one.get("least"))
        count_reuse(replaced, happened)
        wrap(replaced, Scheduler, "preempt", partial(_counted, happened, lambda *_: "preempted"))
        wrap(replaced, Loader, "unload_here", partial(_counted, happened, lambda *_: "unloaded"))
        wrap(replaced, EngineMetrics, "step", partial(_counted, happened, _way_of_chunk))
        service = make(settings_of(one))
        played = Client(service).play(one["do"])
    played |= {
        "happened": happened,
        "cache": comparable(service.cache_report()),
        "engines": len(service.figures().engines),
        "models": [[each.model, each.kv_layout, each.drafter] for each in service.health().models],
    }
    service.close()
    return played


def measured_as(replaced: Replaced, least: int | None) -> None:
    """Let rows share prefixes of so many tokens."""
    if least is not None:
        replaced.setattr(engine_builder, "least_shared", lambda *given: least)


def count_reuse(replaced: Replaced, happened: Counter[str]) -> None:
    """Count rows that begin behind a shared prefix, or in the buffers of an entry."""

    def begun(original: Callable[..., Any]) -> Callable[..., Any]:
        def begin(reuse: Any, match: Any, *given: Any) -> Any:
            holding, in_place = original(reuse, match, *given)
            shared = holding.base is not None
            happened["behind a prefix" if shared else "in place"] += bool(in_place)
            happened["shared tokens"] += max(in_place.values(), default=0) if shared else 0
            return holding, in_place

        return begin

    wrap(replaced, Reuse, "begin", begun)


def settings_of(one: dict[str, Any]) -> EngineSettings:
    return replace(engine_settings(), **one.get("settings", {}))


def comparable(report: dict[str, Any]) -> dict[str, Any]:
    """What of a prefix cache is the same on every rank."""
    return {name: value for name, value in report.items() if name != "budget"}


def _counted(
    happened: Counter[str], named: Callable[..., str], original: Callable[..., Any]
) -> Callable[..., Any]:
    def call(*given: Any, **more: Any) -> Any:
        happened[named(*given, **more)] += 1
        return original(*given, **more)

    return call


def _way_of_chunk(recorder: Any, seconds: float, chunk: int, *, mixed: bool) -> str:
    return "decoded" if not chunk else "mixed" if mixed else "apart"


class Here(Follower):
    """A follower whose folders may be elsewhere, and that can be asked what it holds.

    By its own clock, costs, limits and memory it would decide otherwise than rank 0.
    """

    def __init__(self, settings: EngineSettings, *given: Any) -> None:
        super().__init__(replace(settings, **OTHERWISE), *given)

    def _start(self, told: Any) -> None:
        super()._start(told)
        for engine in self._engines.values():
            engine.state.clock = lambda: -100 * time.monotonic()
            engine.scheduler.costs.pace = SLOW

    def _load(self, told: Any) -> None:
        elsewhere = PLAYED.get("elsewhere", {}).get(RANK, {})
        folder = elsewhere.get(told["key"]["folder"], told["key"]["folder"])
        super()._load({**told, "name": folder, "key": {**told["key"], "folder": folder}})

    def holds(self) -> dict[str, Any]:
        schedulers = [each.scheduler for each in self._engines.values()]
        kept = self._models.prefixes._cache
        if kept is not None:
            kept.check_integrity()
        return {
            "requests": len(self._requests),
            "rows": sum(len(each.running) + len(each.waiting) for each in schedulers),
            "cache": {} if kept is None else comparable(kept.report()),
            "engines": len(self._engines),
        }


def follow(registry: PluginRegistry) -> None:
    vars(channels)["LEADER_PATIENCE"] = PATIENCE
    group, hello = join(engine_settings(), registry)
    channel = FollowerChannel.join(group, hello, _left_alone)
    told: list[Any] = []
    with Isolation() as trying:
        for one in PLAYED["plays"]:
            happened: Counter[str] = Counter()
            with Replaced() as replaced:
                measured_as(replaced, one.get("least") and 2**20)
                count_reuse(replaced, happened)
                here = Here(settings_of(one), registry, channel, group)
                here.run()
            told.append({**here.holds(), "happened": happened})
    if trying.fault is not None:
        print(f"rank {RANK}: {trying.fault.trace}", file=sys.stderr, flush=True)
        channel.failed(trying.fault.summary)
        time.sleep(LEAVES)
    tell(int(RANK), told)


def lead(registry: PluginRegistry) -> None:
    group, hello = join(engine_settings(), registry)
    channel = LeaderChannel.open(group, hello, _left_alone, patience=PATIENCE)
    ranks = ranks_of(group, channel)
    played = [
        play(one, lambda settings: ChatService(settings, registry=registry, processes=ranks))
        for one in PLAYED["plays"]
    ]
    tell(0, played)
    channel.close()


def _left_alone(fault: RankFault) -> None:
    """Collectives wait for a rank that is gone."""
    print(f"rank {RANK}: {fault}", file=sys.stderr, flush=True)
    timer = threading.Timer(LEAVES, os._exit, (1,))
    timer.daemon = True
    timer.start()


def main() -> None:
    registry = PluginRegistry.discover()
    if RANK == "0":
        lead(registry)
    elif RANK:
        follow(registry)
    else:
        make = partial(ChatService, registry=registry)
        tell(0, [play(one, make) for one in PLAYED["plays"]])


with Isolation() as trying:
    main()
if trying.fault is not None:
    print(trying.fault.trace, file=sys.stderr)
sys.stdout.flush()
sys.stderr.flush()
os._exit(trying.fault is not None)  # no thread of ours or of the ring's is waited for
