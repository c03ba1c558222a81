"""What rendering and tokenising of a long prompt costs other threads of the engine's process.

A thread that sleeps for a fifth of a millisecond stands for the engine thread: it needs the
interpreter lock after each sleep.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx_provider
from mlx_provider.config import EngineSettings
from mlx_provider.cores import cores
from mlx_provider.protocol.requests import GenerateRequest, ModelOptions
from mlx_provider.server.run import SWITCH
from mlx_provider.serving.prompt import prepare
from mlx_provider.serving.service import ChatService
from mlx_provider_bench.report import Result
from tiny import build

SLEEP = 0.0002
ENTRIES = 1 << 18
"""Largest vocabulary."""


@dataclass(frozen=True)
class Plan:
    tokenizer: Path
    """A `tokenizer.json`, which replaces the one of a tiny model."""
    characters: int = 400_000
    repeats: int = 5


@contextmanager
def beside() -> Iterator[list[float]]:
    """CPU seconds of the process during each sleep of the other thread. Other processes do not
    change them."""
    slept: list[float] = []
    stop = threading.Event()

    def sleep() -> None:
        while not stop.is_set():
            began = time.process_time()
            time.sleep(SLEEP)
            slept.append(time.process_time() - began)

    thread = threading.Thread(target=sleep)
    thread.start()
    yield slept
    stop.set()
    thread.join()


def bench(plan: Plan) -> Result:
    """CPU milliseconds of a prompt, and of the process in the other thread's sleeps."""
    sys.setswitchinterval(SWITCH)
    with tempfile.TemporaryDirectory() as root:
        sizes = {"vocab_size": ENTRIES, "hidden_size": 32, "max_position_embeddings": 1 << 20}
        folder = build(Path(root) / "m", "qwen3", **sizes)
        shutil.copy(plan.tokenizer, folder / "tokenizer.json")
        service = ChatService(EngineSettings(kv_layout="solo", measurements="off"))
        try:
            view, lease = service._models.use(str(folder), ModelOptions())
            with lease:
                source = sorted(Path(mlx_provider.__file__).parent.rglob("*.py"))
                text = "".join(each.read_text() for each in source)[: plan.characters]
                request = GenerateRequest(
                    model=str(folder), messages=[{"role": "user", "content": text}]
                )
                tokens = len(prepare(view, request).prompt.tokens)
                with beside() as alone:
                    time.sleep(2)
                cpu = time.thread_time()
                with beside() as together:
                    for _ in range(plan.repeats):
                        prepare(view, request)
                cpu = time.thread_time() - cpu
        finally:
            service.close()
    return {
        "benchmark": "long_prompt",
        **asdict(plan),
        "tokenizer": str(plan.tokenizer),
        "device": "none",
        "cores": cores(),
        "load_average": round(os.getloadavg()[0], 2),
        "tokens": tokens,
        "cpu_ms_of_a_prompt": round(1000 * cpu / plan.repeats),
        "cpu_ms_of_a_sleep_alone": quantiles(alone),
        "cpu_ms_of_a_sleep_beside": quantiles(together),
    }


def quantiles(seconds: list[float]) -> dict[str, float]:
    """In milliseconds."""
    ranked = sorted(seconds)
    at = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "longest": 1.0}
    return {name: round(1000 * ranked[int(q * (len(ranked) - 1))], 1) for name, q in at.items()}
