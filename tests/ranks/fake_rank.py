"""One rank over a scripted service: `python fake_rank.py SERVE OPTIONS`, under `mlx.launch`.

`raise` as a prompt makes every follower raise; `FAKE_RANK_MLX` is the version that followers say
they have.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from fake_engine import FakeService

from mlx_provider.config import EngineSettings
from mlx_provider.protocol.event_queue import EventQueue
from mlx_provider.protocol.events import Accepted
from mlx_provider.protocol.requests import GenerateRequest
from mlx_provider.server.run import end_process
from mlx_provider.serving.interface import Deliver
from mlx_provider_ranks import hello, process
from mlx_provider_ranks.channel import FollowerChannel, LeaderChannel
from mlx_provider_ranks.messages import Hello


class LeadingService(FakeService):
    def __init__(self, settings: EngineSettings, deliver: Deliver, channel: LeaderChannel) -> None:
        super().__init__(settings, deliver)
        self.channel = channel

    def submit(self, request: GenerateRequest, queue: EventQueue) -> Accepted:
        self.channel.tell({"kind": str(request.prompt).partition(" ")[0]})
        if request.prompt == "raise":
            request = request.model_copy(update={"prompt": "wait"})
        return super().submit(request, queue)

    def close(self) -> None:
        super().close()
        self.channel.tell({"kind": "end"})
        self.channel.close()


def lead(
    settings: EngineSettings, deliver: Deliver, registry: object, group: Any, channel: LeaderChannel
) -> LeadingService:
    return LeadingService(settings, deliver, channel)


def follow(
    settings: EngineSettings, registry: object, group: Any, channel: FollowerChannel
) -> None:
    while (kind := channel.hear()["kind"]) != "end":
        if kind == "raise":
            raise RuntimeError("scripted failure of the follower")


def other_hello(*arguments: Any) -> Hello:
    mine = own_hello(*arguments)
    version = os.environ.get("FAKE_RANK_MLX") if mine.rank else None
    versions = {**mine.versions, "mlx": version} if version else mine.versions
    return mine.model_copy(update={"versions": versions})


own_hello = hello.own_hello
hello.own_hello = other_hello  # before `group`, which imports MLX, takes it

if __name__ == "__main__":
    end_process(process.main(None, lead, follow))
