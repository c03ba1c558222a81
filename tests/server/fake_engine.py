"""An engine process over a scripted service: `python fake_engine.py [server options]`.

The prompt is the script: `count N GAP`, `flood N [wait]`, `wait`, `until PATH N GAP`,
`slow SECONDS`, `gate`, `fail CODE [RETRY_AFTER]`, `break CODE`, `bug`, `text WORDS`, `switch`,
`slowexit`, `die` (as after the death of the engine thread). `switch` says the switch interval of
threads. `until` says one word and counts to N once the file PATH exists. `break` says one word and
fails. FAKE_CLOCK names a file whose time of change is the clock
by which the engine is idle. `/cache` tells what the service saw, DELETE opens the gate at which
`gate` waits to be accepted; `FAKE_START` makes the start fail.
"""

import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlx_provider import __version__
from mlx_provider.errors import EngineUnavailable, from_code
from mlx_provider.protocol.event_queue import Deliver, EventQueue
from mlx_provider.protocol.events import (
    Accepted,
    Delta,
    Done,
    ErrorBody,
    Event,
    Failed,
    Finish,
    Timings,
    Usage,
)
from mlx_provider.protocol.health import Health, ModelStatus, Stats
from mlx_provider.protocol.requests import GenerateRequest
from mlx_provider.settings import EngineSettings

MODEL = ModelStatus(
    model="fake",
    family="fake",
    plugin="none",
    model_type="fake",
    context_length=1,
    kv_layout="solo",
    vision=False,
    weights_bytes=0,
)


class FakeService:
    alive = True

    def __init__(self, settings: EngineSettings, deliver: Deliver = lambda put: put()) -> None:
        trouble = os.environ.get("FAKE_START", "")
        if trouble.startswith("code:"):
            raise from_code(trouble.removeprefix("code:"), "scripted trouble")
        if trouble == "crash":
            raise RuntimeError("scripted crash")
        if trouble == "hang":
            time.sleep(60)
        self.deliver = deliver
        self.closing = threading.Event()
        self.cancels: dict[str, threading.Event] = {}
        self.queues: dict[str, EventQueue] = {}
        self.seen: dict[str, list[str]] = {"submitted": [], "cancelled": [], "finished": []}
        self.ok = True
        self.gate = threading.Event()
        self.players: list[threading.Thread] = []

    def submit(self, request: GenerateRequest, queue: EventQueue) -> Accepted:
        prompt = request.prompt or (request.messages or [{}])[-1].get("content")
        if isinstance(prompt, list):
            prompt = prompt[0]["text"]
        assert isinstance(prompt, str)
        if self.closing.is_set():
            raise EngineUnavailable("closing")
        word, *values = prompt.split(maxsplit=1 if prompt[:4] == "text" else -1)
        self.seen["submitted"].append(request.id)
        self.cancels[request.id] = threading.Event()
        self.queues[request.id] = queue
        if word == "slow":
            time.sleep(float(values[0]))
        if word == "gate":
            self.gate.wait()
        if word == "fail":
            later = float(values[1]) if values[1:] else None
            raise from_code(values[0], "scripted", "prompt", later)
        if word == "bug":
            raise ValueError("scripted bug")
        if word == "slowexit":
            time.sleep(0.5)
            os._exit(9)
        if word == "break":
            error = from_code(values[0], "grammar: scripted", "grammar")
            queue.put([Delta(content="begun "), Failed.of(error)])
        player = threading.Thread(
            target=self._play, args=(request.id, word, values, queue), daemon=True
        )
        self.alive = word != "die"
        player.start()
        self.players.append(player)
        return Accepted(id=request.id, model=request.model, prompt_tokens=3, max_tokens=9)

    def _play(self, id_: str, word: str, values: list[str], queue: EventQueue) -> None:
        post = lambda *events: self.deliver(partial(queue.put, events))  # noqa: E731
        cancelled = self.cancels[id_]
        if word == "until":
            path, *values = values
            post(Delta(content="begun "))
            while not (Path(path).exists() or self.closing.is_set() or cancelled.wait(0.01)):
                pass
        if word in ("count", "flood", "until"):
            gap = 0.0 if word == "flood" else float(values[1])
            for index in range(int(values[0])):
                post(Delta(content="x" * 1000 if word == "flood" else f"{index} "))
                if (gap and cancelled.wait(gap)) or self.closing.is_set():
                    break
        elif word == "text":
            post(Delta(content=values[0]))
        elif word == "switch":
            post(Delta(content=str(sys.getswitchinterval())))
        if word == "wait" or values[1:] == ["wait"]:
            while not cancelled.is_set() and not self.closing.is_set():
                cancelled.wait(0.02)
        if self.closing.is_set() and os.environ.get("FAKE_CLOSE") != "silent":
            post(Failed(error=ErrorBody.of(EngineUnavailable("closed by the service"))))
        elif not self.closing.is_set():
            self.seen["finished"].append(id_)
            post(*last("cancelled" if cancelled.is_set() else "stop"))

    def count(self, request: GenerateRequest) -> int:
        return len((request.prompt or "").split())

    def cancel(self, request_id: str) -> None:
        self.seen["cancelled"].append(request_id)
        if request_id in self.cancels:
            self.cancels[request_id].set()

    def health(self) -> Health:
        version = os.environ.get("FAKE_VERSION", __version__)
        protocol = int(os.environ.get("FAKE_PROTOCOL", "1"))
        return Health(
            ok=self.ok,
            version=version,
            protocol=protocol,
            pid=os.getpid(),
            device="fake",
            blas="",
            models=[MODEL],
        )

    def loading(self, model: str) -> str:
        return ""

    def metrics(self) -> bytes:
        from mlx_provider.serving.metrics import EngineMetrics  # imports mlx-lm: most of a start

        return EngineMetrics().exposition()

    def stats(self) -> Stats:
        return Stats(at=time.time(), version=__version__, device="fake", pid=os.getpid())

    @property
    def prefixes(self) -> Any:
        report, clear, shrink = self.cache_report, self.cache_clear, self.cache_shrink
        return SimpleNamespace(report=report, clear=clear, keep_share=shrink)

    def cache_report(self) -> dict[str, Any]:
        unread = {name: queue.unread for name, queue in self.queues.items()}
        return {**self.seen, "threads": threading.active_count(), "unread": unread}

    def cache_clear(self) -> None:
        self.seen["finished"].clear()
        self.gate.set()

    def cache_shrink(self, share: float) -> None:
        self.seen["kept"] = share

    def close(self) -> None:
        self.closing.set()
        for player in self.players:
            player.join(10)


def last(reason: Any) -> list[Event]:
    timings = Timings(queued=0, prefill=0, first_token=0, total=0, tokens_per_second=0)
    return [
        Finish(reason=reason),
        Done(usage=Usage(prompt_tokens=3, completion_tokens=1), timings=timings),
    ]


if __name__ == "__main__":
    from mlx_provider.server import handover
    from mlx_provider.server.run import main

    if clock := os.environ.get("FAKE_CLOCK"):
        now = SimpleNamespace(monotonic=lambda: Path(clock).stat().st_mtime)
        handover.time = now  # type: ignore[assignment]
    main(build=FakeService)
