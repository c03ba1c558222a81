"""An engine process whose replies the last message scripts: `python scripted_engine.py --port P`.

`slow` speaks for a minute; what begins with `silent` waits for DELETE `/cache` first, `pause` for a
second; `toolong`, `large`, `missing`, `full`, `busy`, `broken` and `bug` are refused; `weather`
calls a tool; `fail` breaks after one word; anything else is echoed word by word, up to a word that
is a stop. `/cache` tells what became of the requests.
"""

import json
import os
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

from mlx_provider import __version__
from mlx_provider.errors import MemoryInUse, from_code
from mlx_provider.protocol.event_queue import Deliver, EventQueue
from mlx_provider.protocol.events import (
    Accepted,
    Delta,
    Done,
    Embedded,
    ErrorBody,
    Event,
    Failed,
    Finish,
    Timings,
    ToolCallDelta,
    Usage,
)
from mlx_provider.protocol.health import Health, Stats
from mlx_provider.protocol.requests import EmbedRequest, GenerateRequest, ModelRequest
from mlx_provider.settings import EngineSettings

REFUSED = {
    "toolong": ("context_length_exceeded", "prompt is too long: 9000 tokens > 2048 maximum"),
    "missing": ("model_not_found", "no such model; in the local cache: none"),
    "large": ("body_too_large", "the body has 150000000 bytes; this engine takes 134217728"),
    "full": ("overloaded", "256 requests wait"),
    "broken": ("plugin_error", "plugin toy (toy 1.0): Toy.load failed: KeyError: 'x'"),
}
TIMINGS = Timings(queued=0, prefill=0.1, first_token=0.1, total=1, tokens_per_second=50)


class ScriptedService:
    def __init__(self, settings: EngineSettings, deliver: Deliver) -> None:
        self.deliver = deliver
        self.cancels: dict[str, threading.Event] = {}
        self.gates: list[threading.Event] = []
        self.seen: dict[str, list[Any]] = {
            "requests": [],
            "cancelled": [],
            "finished": [],
            "counted": [],
        }

    def submit(self, request: ModelRequest, queue: EventQueue) -> Accepted:
        self.seen["requests"].append(request.model_dump())
        text = script_of(request)
        if text == "busy":
            raise MemoryInUse("other models are in use", retry_after=2.5)
        if text in REFUSED:
            raise from_code(*REFUSED[text])
        if text == "bug":
            raise RuntimeError("scripted bug")
        self.cancels[request.id] = threading.Event()
        play = self.embed if isinstance(request, EmbedRequest) else self.play
        threading.Thread(target=play, args=(request, text, queue), daemon=True).start()
        return Accepted(
            id=request.id,
            model=request.model,
            prompt_tokens=7,
            max_tokens=9,
            context_length=2048,
            echo=text if getattr(request, "echo", False) else "",
            warnings=[f"{name} has no effect" for name in request.ignored],
        )

    def count(self, request: GenerateRequest) -> int:
        self.seen["counted"].append(request.model_dump())
        if script_of(request) in REFUSED:
            raise from_code(*REFUSED[script_of(request)])
        return 100 * len(request.messages or []) + len(request.tools)

    def play(self, request: GenerateRequest, text: str, queue: EventQueue) -> None:
        cancelled = self.cancels[request.id]
        words, reason = text.split(), "stop"
        stop = next((word for word in words if word in request.stop), None)
        words = words if stop is None else words[: words.index(stop)]
        if text == "slow":
            words = [f"w{i}" for i in range(3000)]
        if text == "weather":
            words, reason = [], "tool_calls"
            call = ToolCallDelta(index=0, id="call_1", name="get_weather", arguments='{"city":')
            self.post(queue, Delta(reasoning="hm", tool_calls=[call]))
            rest = ToolCallDelta(index=0, arguments='"Paris"}')
            self.post(queue, Delta(tool_calls=[rest]))
        if text.startswith("silent"):
            gate = threading.Event()
            self.gates.append(gate)
            while not gate.wait(0.02):
                if cancelled.is_set():
                    return
        if text == "pause" and cancelled.wait(1):
            return
        for index, word in enumerate(words):
            self.post(queue, Delta(content=f" {word}" if index else word))
            if cancelled.wait(0.02 if text == "slow" else 0):
                return
            if text == "fail":
                failed = ErrorBody(code="request_failed", message="scripted failure", status=500)
                self.post(queue, Failed(error=failed))
                return
        self.ended("finished", request.id)
        usage = Usage(prompt_tokens=7, cached_tokens=5, completion_tokens=max(1, len(words)))
        self.post(queue, Finish(reason=reason, stop=stop), Done(usage=usage, timings=TIMINGS))

    def embed(self, request: EmbedRequest, text: str, queue: EventQueue) -> None:
        """A vector for each input, or for ever where the first is `slow`."""
        for index in range(3000 if text == "slow" else len(request.input)):
            self.post(queue, Embedded(index=index, vector="AACAPw=="))
            if self.cancels[request.id].wait(0.02 if text == "slow" else 0):
                return
        self.ended("finished", request.id)
        usage = Usage(prompt_tokens=7, completion_tokens=0)
        self.post(queue, Done(usage=usage, timings=TIMINGS))

    def post(self, queue: EventQueue, *events: Event) -> None:
        self.deliver(partial(queue.put, events))

    def cancel(self, request_id: str) -> None:
        if request_id in self.cancels:
            self.cancels[request_id].set()
            self.ended("cancelled", request_id)

    def ended(self, how: str, request_id: str) -> None:
        """Told of requests since the last DELETE: those of an earlier test may end late."""
        if any(request["id"] == request_id for request in self.seen["requests"]):
            self.seen[how].append(request_id)

    def health(self) -> Health:
        return Health(ok=True, version=__version__, pid=os.getpid(), device="fake", blas="none")

    def metrics(self) -> bytes:
        return b""

    def stats(self) -> Stats:
        return Stats(at=time.time(), version=__version__, device="fake", pid=os.getpid())

    @property
    def prefixes(self) -> Any:
        return SimpleNamespace(report=self.cache_report, clear=self.cache_clear)

    def cache_report(self) -> dict[str, Any]:
        return json.loads(json.dumps(self.seen))

    def cache_clear(self) -> None:
        for names in self.seen.values():
            names.clear()
        for gate in self.gates:
            gate.set()

    def close(self) -> None:
        for cancelled in self.cancels.values():
            cancelled.set()


def script_of(request: ModelRequest) -> str:
    """The raw prompt, the first input, or the text of the last message."""
    if isinstance(request, EmbedRequest):
        return str(request.input[0])
    assert isinstance(request, GenerateRequest)
    if isinstance(request.prompt, str):
        return request.prompt
    if request.prompt is not None:
        return " ".join(map(str, request.prompt))
    content = request.messages[-1].get("content") or ""
    if isinstance(content, list):
        content = " ".join(part.get("text", "") for part in content)
    return content


if __name__ == "__main__":
    from mlx_provider.server.run import main

    main(build=ScriptedService)
