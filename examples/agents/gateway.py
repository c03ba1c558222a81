"""A LiteLLM proxy and an engine with scripted models, and what both have seen."""

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from answering import Answering

from mlx_provider.client.connection import Connections
from mlx_provider.client.http import HttpClient
from mlx_provider.client.messages import parse_stats
from mlx_provider.gateway.config import proxy_config, write_config
from mlx_provider.gateway.engine import end_engine
from mlx_provider.gateway.proxy import Proxy, start_proxy
from mlx_provider.protocol.health import RequestStats
from mlx_provider.protocol.requests import GenerateRequest
from mlx_provider.testing.scripted import build, environment

WIDE = 200_000
CONTEXTS = (WIDE, 32_000, 40_000, 48_000, 64_000)
"""Tokens of the contexts to choose from: agents' first prompts differ."""
CHUNK = 128
"""Tokens of a pass at most, so that a prompt that takes minutes is cut short within seconds."""
BEGUN = 10
"""Tokens after which a reply is in its middle."""
POLL = 0.1
STATS = "/v1/stats"

ENDED = re.compile(
    r"request (?P<id>\w+): (?P<reason>.*?); .*?"
    r"prefill (?:\d+ of )?(?P<new>\d+) new / (?P<cached>\d+) cached tokens"
)
ANSWERED = re.compile(r'"POST (?P<path>/\S+) HTTP/1\.1" (?P<status>\d+)')


@dataclass(frozen=True)
class Ended:
    """A request that the engine has done with."""

    reason: str
    new: int
    cached: int

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return self.new + self.cached


@dataclass(frozen=True)
class Seen:
    """What both logs say of a time."""

    requests: list[Ended]
    statuses: list[int]

    @property
    def errors(self) -> list[int]:
        return [status for status in self.statuses if status >= 400]


@dataclass(frozen=True)
class Gateway:
    """Both processes, ready."""

    proxy: Proxy
    answers: Answering
    """Of the proxy."""
    engine: Answering

    def now(self) -> tuple[int, int]:
        """A moment, for `since`."""
        return (_size(self.engine.log), _size(self.proxy.log))

    def since(self, moment: tuple[int, int]) -> Seen:
        """What was logged since then."""
        engine, proxy = (
            path.read_bytes()[start:].decode(errors="replace")
            for path, start in zip((self.engine.log, self.proxy.log), moment, strict=True)
        )
        ended = [
            Ended(found["reason"], int(found["new"]), int(found["cached"]))
            for found in ENDED.finditer(engine)
        ]
        return Seen(ended, [int(found["status"]) for found in ANSWERED.finditer(proxy)])

    def replies(self, least: int) -> bool:
        """Whether the reply to a prompt of at least so many tokens is in its middle."""
        return any(
            each.prompt_tokens >= least and each.completion_tokens >= BEGUN
            for each in self._requests() or []
        )

    def free(self) -> bool:
        """Whether no request waits or runs."""
        return self._requests() == []

    def _requests(self) -> list[RequestStats] | None:
        """Those that have not ended; `None`: the engine did not answer this time."""
        line = self.engine.ask(STATS)
        return None if line is None else parse_stats(line).requests

    def wait(self, what: Callable[[], bool], limit: float) -> bool:
        """Wait until something is so, for `limit` seconds at most; whether it is."""
        deadline = time.monotonic() + limit
        self.check()
        while not (reached := what()) and time.monotonic() < deadline:
            time.sleep(POLL)
            self.check()
        return reached

    def check(self) -> None:
        """Raise `EngineUnavailable`, with the end of its log, where either is gone or hangs."""
        code = self.proxy.process.poll()
        if code is not None:
            raise self.answers.gone(f"has ended with exit code {code}")
        self.answers.check()
        self.engine.check()


def model_name(context: int) -> str:
    """What clients call the model with this context."""
    return f"scripted-{context // 1000}k"


@contextmanager
def gateway(calls: str, keep: Path | None = None) -> Iterator[Gateway]:
    """Start both, and end them with the block. `keep`: where their logs are left."""
    with ExitStack() as ending:
        folder = Path(tempfile.mkdtemp(prefix="mlxp-agents-"))
        ending.callback(shutil.rmtree, folder, ignore_errors=True)
        own = {
            **os.environ,
            **environment(folder / "site"),
            "MLX_PROVIDER_RUNTIME_DIR": str(folder),
            "MLX_PROVIDER_DISK_CACHE_BYTES": "0",
            "XDG_STATE_HOME": str(folder),
            "MLX_PROVIDER_IDLE_TIMEOUT": "3600",  # so that an engine that is gone is a fault
            "MLX_PROVIDER_MAX_CHUNK": str(CHUNK),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        connections = Connections(own)
        engine = connections.client(None, None)
        ending.callback(end_engine, engine)
        ending.callback(connections.close)
        config = _config(build(folder / "model", calls))
        proxy = start_proxy(
            write_config(config, folder), own, options=("--log_config", _log_config(folder))
        )
        answers = Answering("proxy", proxy.log, "/health/liveliness", proxy.url)
        asked = Answering(
            "engine", folder / "engine.log", STATS, "http://engine", folder / "engine.sock"
        )
        for each in (answers, asked):
            ending.callback(each.close)
        running = Gateway(proxy, answers, asked)
        ending.callback(_keep, running, keep)
        ending.callback(proxy.stop)
        _begin(engine, folder / "model")
        proxy.wait_ready()
        yield running


def _begin(engine: HttpClient, model: Path) -> None:
    """The first request starts the engine."""
    messages = [{"role": "user", "content": "Hello"}]
    generation = engine.submit(GenerateRequest(model=str(model), messages=messages))
    while generation.get():
        pass
    generation.close()


def _config(model: Path) -> dict:
    entries = []
    for context in CONTEXTS:
        (entry,) = proxy_config(model_name(context), str(model))["model_list"]
        entry["model_info"] |= {"max_input_tokens": context, "mlx": {"context_length": context}}
        entries.append(entry)
    return {**proxy_config("", ""), "model_list": entries}


def _log_config(folder: Path) -> str:
    """A file by which uvicorn logs every answer's status."""
    handler = {"class": "logging.StreamHandler", "formatter": "plain"}
    formatter = {"()": "uvicorn.logging.AccessFormatter", "use_colors": False}
    formatter["fmt"] = '"%(request_line)s" %(status_code)s'
    access = {"handlers": ["out"], "level": "INFO", "propagate": False}
    settings = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": formatter},
        "handlers": {"out": handler},
        "loggers": {"uvicorn.access": access},
    }
    path = folder / "logging.json"
    path.write_text(json.dumps(settings))
    return str(path)


def _keep(running: Gateway, where: Path | None) -> None:
    if where is not None:
        where.mkdir(parents=True, exist_ok=True)
        for path in (running.engine.log, running.proxy.log):
            if path.is_file():
                shutil.copy(path, where)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
