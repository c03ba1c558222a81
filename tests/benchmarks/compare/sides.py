"""The participants, each with a client through one LiteLLM proxy."""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_provider.commands import PREFIX, Proxy, proxy_config, separate_gateway
from mlx_provider.errors import EngineUnavailable, RequestFailed
from peers import HELLO, THINKING, through_proxy
from servers import START_LIMIT, Answer, Client, Kept, Messages, Server, held

from .others import OURS, Other, key_of, model_of
from .plan import Plan, Subject

IDLE_SECONDS = 600
"""Longer than the engine waits while others are asked."""
NATIVE = f"{OURS}-native"
"""Ours with the weights in the checkpoint's own dtype, whatever the device is fast at."""
MAX_SILENT_CASES = 2
"""Times that everything asked of a side may stay without an answer before it is left alone."""
LATER = 30.0
"""Seconds by which the proxy is more patient than we are: who was late is ours to say."""
KEY = "COMPARED_KEY_{}"
"""Variables by which the proxy, and nobody else, is told keys."""
REPEATED, REPEATS = "REPEATED_STREAMING_CHUNK_LIMIT", "1000000"
"""Equal pieces of a stream after which LiteLLM breaks it off: random models repeat themselves."""


@dataclass
class Side:
    name: str
    client: Client
    images: bool = True
    """Whether it is asked about images at all."""
    kept: Kept | None = None
    """Its process, where it is ours to start again."""
    deaths: list[str] = field(default_factory=list)
    _silent: int = 0

    @property
    def given_up(self) -> bool:
        return self._silent >= MAX_SILENT_CASES

    def ready(self) -> None:
        """Ask a silent server once more before a part."""
        self._silent = min(self._silent, MAX_SILENT_CASES - 1)
        self.revive()

    def revive(self) -> None:
        """Before a case, start a process again that has died, unless that failed before."""
        if self.kept is not None and self.died():
            try:
                self.kept.start()
            except EngineUnavailable as error:
                self.deaths.append(error.message[:200])
                self.kept = None

    def died(self) -> bool:
        """Whether its process has ended; notes it."""
        if self.kept is None or not self.kept.death:
            return False
        self.deaths.append(self.kept.death)
        return True

    def alone(self, questions: Sequence[Messages], reply: int) -> list[Answer]:
        """Answers to the questions, one by one."""
        return [self._heard([self._ask(each, reply)])[0] for each in questions]

    def together(
        self,
        questions: Sequence[Messages],
        reply: int,
        *,
        apart: float = 0.0,
        heard: Callable[[], bool] = lambda: True,
    ) -> list[Answer]:
        """Answers to all at once, or `apart` seconds after one another."""
        if self.given_up:
            return [self._not_asked()] * len(questions)
        return self._heard(self.client.ask_together(questions, reply, apart=apart, heard=heard))

    def _ask(self, messages: Messages, reply: int) -> Answer:
        return self._not_asked() if self.given_up else self.client.try_ask(messages, reply)

    def _heard(self, answers: list[Answer]) -> list[Answer]:
        if answers and all(answer.late for answer in answers):
            self._silent += 1
        elif any(not answer.failure for answer in answers):
            self._silent = 0
        return answers

    def _not_asked(self) -> Answer:
        return Answer("", 0.0, 0.0, 0, 0, failure="not asked again: it gave no answer in time")


@dataclass(frozen=True)
class Absent:
    """A side that cannot take part, or whose process ended, and why."""

    server: str
    model: str
    format: str
    why: str


def in_turn(sides: Sequence[Side], turn: int) -> list[Side]:
    """The sides, each turn with another one first, because the speed of a machine drifts."""
    first = turn % len(sides)
    return [*sides[first:], *sides[:first]]


@contextmanager
def opened(plan: Plan, subject: Subject) -> Iterator[tuple[list[Side], list[Absent]]]:
    """Every side that has answered once with the subject's model, and the absent ones.

    Raises `NotInstalled` or `EngineUnavailable` if the proxy cannot start.
    """
    with ExitStack() as ending:
        logs = Path(ending.enter_context(tempfile.TemporaryDirectory()))
        opening = _Opening(plan, subject, _ours(plan, subject))
        for kind in plan.kinds:
            kept = Kept(kind, subject.folder, logs / f"{kind.name}.log")
            ending.callback(kept.stop)
            opening.start(kept)
        for other in plan.others:
            opening.find(other)
        proxy = _proxy(ending, opening.config, opening.variables)
        sides = []
        for name in opening.names():
            server = Server(through_proxy(name), proxy.url, subject.folder, proxy.key, alias=name)
            try:
                _greet(server, opening.patience(name))
            except RequestFailed as error:
                opening.leave_out(name, error.message)
                continue
            client = Client(server, limit=plan.limit)
            ending.callback(client.close)
            sides.append(opening.side(name, client))
        yield sides, opening.absent


def _proxy(ending: ExitStack, config: Mapping[str, Any], variables: Mapping[str, str]) -> Proxy:
    """A proxy that answers; it and its engine end with `ending`."""
    own = {PREFIX + "IDLE_TIMEOUT": str(IDLE_SECONDS), "HF_HUB_OFFLINE": "1"}
    with held():
        apart = ending.enter_context(separate_gateway(config, {**os.environ, **variables, **own}))
    apart.proxy.wait_ready()
    return apart.proxy


def _greet(server: Server, limit: float) -> None:
    """Some servers load their model with the first request: send it now. Raises `RequestFailed`."""
    client = Client(server, limit=limit)
    try:
        client.ask(HELLO, 4)
    finally:
        client.close()


@dataclass
class _Opening:
    """The proxy's config, while sides start."""

    plan: Plan
    subject: Subject
    config: dict[str, Any]
    variables: dict[str, str] = field(default_factory=lambda: {REPEATED: REPEATS})
    kept: dict[str, Kept] = field(default_factory=dict)
    absent: list[Absent] = field(default_factory=list)

    def start(self, kept: Kept) -> None:
        try:
            server = kept.start()
        except EngineUnavailable as error:
            self.leave_out(kept.kind.name, error.message)
            return
        self.kept[kept.kind.name] = kept
        self._enter(kept.kind.name, f"{server.url}/v1", os.fspath(server.folder), server.key)
        self.config["model_list"][-1]["litellm_params"]["extra_body"] = THINKING

    def find(self, other: Other) -> None:
        try:
            self._enter(other.name, other.base, model_of(other), key_of(other))
        except EngineUnavailable as error:
            self.leave_out(other.name, error.message)

    def _enter(self, name: str, base: str, model: str, key: str) -> None:
        variable = KEY.format(len(self.variables))
        self.variables[variable] = key
        params = {
            "model": f"openai/{model}",
            "api_base": base,
            "api_key": f"os.environ/{variable}",
            "timeout": self.plan.limit + LATER,
            "stream_timeout": self.plan.limit + LATER,
            "max_retries": 0,
        }
        self.config["model_list"].append({"model_name": name, "litellm_params": params})

    def leave_out(self, name: str, why: str) -> None:
        self.absent.append(Absent(name, self.subject.model, self.subject.format, why[:300]))

    def names(self) -> list[str]:
        return [entry["model_name"] for entry in self.config["model_list"]]

    def patience(self, name: str) -> float:
        """Seconds for a first answer; servers that run already have loaded their model."""
        there = any(other.name == name for other in self.plan.others)
        return self.plan.limit if there else max(self.plan.limit, START_LIMIT)

    def side(self, name: str, client: Client) -> Side:
        kept = self.kept.get(name)
        return Side(name, client, kept.kind.images if kept else True, kept)


def _ours(plan: Plan, subject: Subject) -> dict[str, Any]:
    config = proxy_config(OURS, os.fspath(subject.folder))
    config["router_settings"]["disable_cooldowns"] = True  # a server that fails is asked again
    if plan.native and subject.format != "float32" and _is_cpu():
        (entry,) = proxy_config(NATIVE, os.fspath(subject.folder))["model_list"]
        entry["model_info"]["mlx"] = {"dtype": "native"}
        config["model_list"].append(entry)
    return config


def _is_cpu() -> bool:
    """Whether the engine computes in float32 whatever the checkpoint has."""
    import mlx.core as mx

    return bool(mx.default_device() == mx.cpu)
