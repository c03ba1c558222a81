"""Files of the persistent gateway: key, record and lock, in a folder of this user only.

The persistent gateway: starts it, finds it, ends it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress

from ..client.connection import TRANSPORT
from ..errors import EngineUnavailable
from . import foreground
from .config import ANYTHING, served_config, write_config
from .kept import POLL, Kept, Record, Running
from .progress import Tell, end_idle_engine
from .proxy import START_LIMIT, STOP_LIMIT, Proxy, is_ready, require_proxy, start_proxy
from .start import own_engine, start_both

FIRST_LIMIT = 120.0


def start(kept: Kept, record: Record, environ: Mapping[str, str], tell: Tell) -> bool:
    """Start proxy and engine, which continue after this process. Both are then ready.

    False if another process was first. On failure, no proxy is left, and the record is unchanged.
    Raises `NotInstalled`, `EngineUnavailable`, the errors of loading the model, and
    `foreground.Ended` for a signal."""
    require_proxy()
    own = {**environ, TRANSPORT: "process"}
    with foreground.ending_by_signal(), ExitStack() as ending, ExitStack() as failing:
        lock = kept.try_lock()
        if lock is None:
            return False
        ending.callback(lock.release)
        key, new = kept.key()
        tell("key", f"{kept.key_file}, {'new' if new else 'as before'}")

        def start_its_proxy() -> Proxy:
            failing.callback(kept.write, kept.record())
            kept.write(record)
            config = write_config(served_config(record.served, ANYTHING), kept.folder)
            proxy = start_proxy(config, own, port=record.port, key=key, lock=lock)
            failing.callback(proxy.stop)
            return proxy

        engine = own_engine(own, ending)
        proxy = start_both(record.served, engine, start_its_proxy, tell)
        # the engine then has a client, and does not end when idle
        proxy.answer_once(record.served.name, FIRST_LIMIT)
        failing.pop_all()
    return True


def await_ready(kept: Kept, running: Running) -> None:
    """Wait for a gateway that another process has started. Raises `EngineUnavailable` if it does
    not answer, or ends."""
    deadline = time.monotonic() + START_LIMIT
    while not is_ready(running.record.url):
        if kept.running() != running:
            raise EngineUnavailable(f"the gateway ended at its start: see {kept.folder}/proxy.log")
        if time.monotonic() > deadline:
            raise EngineUnavailable(
                f"the gateway (process {running.pid}) does not answer: `mlx-provider down` ends it"
            )
        time.sleep(POLL)


def stop(kept: Kept, running: Running, environ: Mapping[str, str], tell: Tell) -> None:
    """Raises `EngineUnavailable` if the proxy does not end."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(running.pid, number)
        if _ended(kept, running):
            break
    else:
        raise EngineUnavailable(f"the proxy (process {running.pid}) does not end")
    tell("proxy", f"process {running.pid} has ended")
    tell("engine", end_idle_engine(environ, "`mlx-provider down`"))


def _ended(kept: Kept, running: Running) -> bool:
    deadline = time.monotonic() + STOP_LIMIT
    while time.monotonic() < deadline:
        if kept.running() != running:
            return True
        time.sleep(POLL)
    return False
