"""A supervised group of real engines, models that fail on demand, and clients of ours."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_provider.client.connection import connect
from mlx_provider.client.generation import EngineClient
from mlx_provider.config import Runtime
from mlx_provider.errors import EngineUnavailable, MLXProviderError
from mlx_provider.protocol.events import Delta, Done, Failed
from mlx_provider.protocol.health import Health
from mlx_provider.protocol.requests import GenerateRequest
from mlx_provider.testing.tiny import build

from .ended import is_gone
from .models import MODELS

LIMIT = 120.0
AT_ONCE = 15.0
"""Seconds in which requests end: five, and time for a machine that is busy otherwise."""
SUPERVISED = """
import sys
from mlx_provider_ranks import supervisor
from mlx_provider_ranks.__main__ import main
supervisor.FORGIVEN = 0.0  # a test breaks one group several times within a minute
sys.exit(main(["--ranks", "2"]))
"""


class Asked:
    """A request on its way; one thread reads it."""

    def __init__(self, client: EngineClient, request: GenerateRequest) -> None:
        self.text = ""
        self.deltas = 0
        self.usage: Any = None
        self.error: MLXProviderError | None = None
        self.ended_at = 0.0
        self._thread = threading.Thread(target=self._read, args=(client, request), daemon=True)
        self._thread.start()

    def _read(self, client: EngineClient, request: GenerateRequest) -> None:
        try:
            generation = client.submit(request)
            while events := generation.get(LIMIT):
                for event in events:
                    self._take(event)
        except MLXProviderError as error:
            self.error = error
        self.ended_at = time.time()

    def _take(self, event: Any) -> None:
        if isinstance(event, Delta):
            self.text += event.content
            self.deltas += 1
        elif isinstance(event, Done):
            self.usage = event.usage
        elif isinstance(event, Failed):
            self.error = event.error.exception()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def end(self) -> Asked:
        """Once it has ended."""
        self._thread.join(LIMIT)
        assert self.ended, "a request hangs"
        return self

    def answer(self) -> str:
        """The whole text. Raises what it has ended with."""
        if (error := self.end().error) is not None:
            raise error
        return self.text


@dataclass
class ServedGroup:
    """Two ranks behind a socket, which are started again whatever becomes of them."""

    folder: Path
    process: subprocess.Popen[str]
    client: EngineClient
    log: list[str] = field(default_factory=list)
    pids: set[int] = field(default_factory=set)
    """Of every rank that was ever seen."""

    def health(self) -> Health:
        """Of a group that serves."""
        found = until(self._health)
        self.pids |= {rank.pid for rank in found.processes}
        return found

    def _health(self) -> Health | None:
        if not Runtime(self.folder).listens():
            return None
        with suppress(EngineUnavailable):
            found = self.client.health()
            return found if all(rank.state == "serving" for rank in found.processes) else None
        return None

    def again(self, before: Health) -> Health:
        """Of the group after that one."""
        return until(lambda: found if (found := self.health()).pid != before.pid else None)

    def ask(self, model: Path, text: Any, *, count: int = 12, **more: Any) -> Asked:
        body = {
            "model": str(model),
            "messages": [{"role": "user", "content": text}],
            "max_tokens": count,
            "sampling": {"temperature": 0},
        }
        return Asked(self.client, GenerateRequest(**(body | more)))


@contextmanager
def served_group(*command: str) -> Iterator[ServedGroup]:
    """A group, ended in order with the block; none of its processes is there then.

    `command`: what is run, else the supervisor of two ranks.
    """
    folder = Path(tempfile.mkdtemp(prefix="mlxp-"))
    site = _installed(folder / "site")
    environ = os.environ | {
        "MLX_PROVIDER_RUNTIME_DIR": str(folder),
        "MLX_PROVIDER_MAX_CHUNK": "64",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])),
    }
    process = subprocess.Popen(
        command or [sys.executable, "-c", SUPERVISED],
        env=environ, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    client = connect(f"unix:{folder / 'engine.sock'}")
    group = ServedGroup(folder, process, client)
    reader = threading.Thread(target=_read, args=(group,), daemon=True)
    reader.start()
    try:
        group.health()
        yield group
    finally:
        client.close()
        ending = len(group.log)
        process.send_signal(signal.SIGTERM)
        code = process.wait(LIMIT)
        reader.join(LIMIT)
        print("".join(group.log))
        shutil.rmtree(folder)
    assert code == 0
    assert not [line for line in group.log[ending:] if "exited with code" in line]
    assert not [pid for pid in group.pids if not is_gone(pid)]


def faulty_model(folder: Path, name: str, **sizes: Any) -> Path:
    """A tiny model of `MODELS` that meets the faults which `fail` writes."""
    plugin, family, overrides = MODELS[name]
    return build(folder, family, faulty=plugin, **(overrides | sizes))


def fail(model: Path, rank: int, at: str, do: str, *, least: int = 0) -> None:
    """Let a rank fail once, at such a place: see `faulty`."""
    (model / "met.json").unlink(missing_ok=True)
    new = model / "new.json"
    new.write_text(json.dumps({"rank": rank, "at": at, "do": do, "least": least}))
    new.rename(model / "fault.json")


def met(model: Path) -> float | None:
    """When it has, Unix seconds."""
    file = model / "met.json"
    return file.stat().st_ctime if file.exists() else None


def until(found: Callable[[], Any]) -> Any:
    """What is found in the end."""
    deadline = time.monotonic() + LIMIT
    while not (value := found()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)
    return value


def _installed(site: Path) -> Path:
    """What pip would leave of a distribution that brings the plugin `faulty`."""
    info = site / "faulty-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mlx_provider]\nfaulty = faulty\n")
    shutil.copy(Path(__file__).with_name("faulty.py"), site)
    return site


def _read(group: ServedGroup) -> None:
    assert group.process.stderr is not None
    with group.process.stderr as lines:
        for line in lines:
            group.log.append(line)
