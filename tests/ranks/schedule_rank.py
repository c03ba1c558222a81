"""One rank of a schedule: what a client of the service does, and what it gets.

    python schedule_rank.py SCHEDULE

SCHEDULE is a JSON file: `{"do": [...], "elsewhere": {rank: {folder: folder}}, "fails": [...]}`.
Under `mlx.launch` rank 0 plays it over all ranks and the others follow; alone it is played in one
process. Every rank tells once: rank 0 what
each request has got, the others what their engines still hold in the end.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from mlx_provider.config import engine_settings
from mlx_provider.errors import MLXProviderError, RankLost
from mlx_provider.isolation import Isolation
from mlx_provider.protocol.event_queue import EventQueue
from mlx_provider.protocol.messages import EmbedRequest, GenerateRequest
from mlx_provider.ranks import group as ranks
from mlx_provider.ranks.follower import Follower
from mlx_provider.registry import PluginRegistry
from mlx_provider.serving.service import ChatService
from mlx_provider.testing.rank_group import tell

RANK = os.environ.get("MLX_RANK", "")
PLAYED: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())


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


def play(service: ChatService) -> dict[str, Any]:
    readers: dict[str, Reader] = {}
    for step in PLAYED["do"]:
        name = step["id"]
        if step["do"] == "ask":
            readers[name] = _ask(service, name, step["request"])
        elif step["do"] == "cancel":
            service.cancel(name)
        elif step["do"] == "clear":
            service.cache_clear()
        else:
            readers[name].read(step.get("tokens", float("inf")))
    for reader in readers.values():
        reader.read(float("inf"))
    answers = {name: reader.got for name, reader in readers.items()}
    return {"answers": answers, "cache": service.cache_report(), "models": _models(service)}


def _ask(service: ChatService, name: str, body: dict[str, Any]) -> Reader:
    reader = Reader()
    kind = EmbedRequest if "input" in body else GenerateRequest
    try:
        service.submit(kind(id=name, **body), reader.queue)
    except MLXProviderError as error:
        reader.fail(error.code, error.message)
    return reader


def _models(service: ChatService) -> list[list[Any]]:
    return [[each.model, each.kv_layout, each.drafter] for each in service.health().models]


class Here(Follower):
    """A follower whose folders may be elsewhere, and that can be asked what it holds."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        FOLLOWERS.append(self)

    def _load(self, told: Any) -> None:
        elsewhere = PLAYED.get("elsewhere", {}).get(RANK, {})
        folder = elsewhere.get(told["key"]["folder"], told["key"]["folder"])
        super()._load({**told, "name": folder, "key": {**told["key"], "folder": folder}})

    def holds(self) -> dict[str, Any]:
        schedulers = [each.scheduler for each in self._engines.values()]
        return {
            "requests": len(self._requests),
            "rows": sum(len(each.running) + len(each.waiting) for each in schedulers),
            "prefix_bytes": self._models.prefix_cache_bytes(),
            "prefixes": self._prefixes(),
            "engines": len(self._engines),
        }

    def _prefixes(self) -> dict[str, Any]:
        kept = vars(self._models)["_prefix_cache"]
        if kept is None:
            return {}
        kept.check_integrity()
        report: dict[str, Any] = kept.report()
        return report


FOLLOWERS: list[Here] = []


def follow(registry: PluginRegistry) -> None:
    vars(ranks)["Follower"] = Here
    try:
        ranks.follow(engine_settings(), registry)
    except RankLost as lost:
        print(lost.message, file=sys.stderr)
    tell(int(RANK), FOLLOWERS[0].holds() if FOLLOWERS else None)


def lead(registry: PluginRegistry) -> None:
    over, channel = ranks.lead(engine_settings(), registry, lambda fault: print(fault, flush=True))
    service = ChatService(engine_settings(), registry=registry, ranks=over)
    tell(0, play(service))
    channel.close()


def main() -> None:
    registry = PluginRegistry.discover()
    if not RANK:
        tell(0, play(ChatService(engine_settings(), registry=registry)))
    elif RANK == "0":
        lead(registry)
    else:
        follow(registry)


with Isolation() as trying:
    main()
if trying.fault is not None:
    print(trying.fault.trace, file=sys.stderr)
sys.stdout.flush()
sys.stderr.flush()
os._exit(trying.fault is not None)  # no thread of ours or of the ring's is waited for
