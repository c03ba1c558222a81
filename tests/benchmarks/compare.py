"""`compare`: this server beside those of mlx-lm, mlx-vlm and others, behind one LiteLLM proxy.

In each round the servers take turns, each time another one first, because the speed of a machine
drifts. All get the same greedy questions. A case in which a request failed has no figure.
"""

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from mlx_provider.commands import PREFIX, folder_of, proxy_config, require_proxy, separate_gateway
from mlx_provider.errors import BadRequest, EngineUnavailable, RequestFailed
from mlx_provider_bench.model_speed import Messages, document, question
from mlx_provider_bench.report import Result, print_rows, surroundings
from random_weights import write_model
from servers import START_LIMIT, Answer, Client, held, started

OURS = "mlx-provider"
PROXIED = {
    PREFIX + "IDLE_TIMEOUT": "600",  # the engine waits while others are asked
    "HF_HUB_OFFLINE": "1",
    # random models repeat themselves, and LiteLLM breaks off a stream after so many equal pieces
    "REPEATED_STREAMING_CHUNK_LIMIT": "1000000",
}
STEP = ("--prefill-step-size", "2048")
"""Prompt tokens of one chunk, the same for every server."""
PEERS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "mlx_lm.server": ((*STEP, "--log-level", "WARNING"), {}),
    "mlx_vlm.server": (
        STEP, {"APC_ENABLED": "1", "APC_DISK_ENABLED": "0", "APC_NUM_BLOCKS": "8192"},
    ),
}  # fmt: skip
"""Modules, with arguments and variables: the prefix cache of mlx-vlm, off by default, is on and has
room for 128k tokens."""
THINKING = {"enable_thinking": True}
"""mlx-vlm's server turns thinking off by default, which changes the prompt."""
LATER = 30.0
"""Seconds by which the proxy is more patient than we are: who was late is ours to say."""
ARRIVALS = {"at once": 0.0, "one after another": 0.15}
"""Seconds between requests: rows that start together, and rows that join those that decode."""
WARMING, SHORT = 4, 8
"""Tokens of an answer that does not count, and of one of which the first token counts."""
MORE_IS_BETTER = {"rate": True, "pace": True, "first_token": False}


@dataclass(frozen=True)
class Other:
    """A server that runs already."""

    name: str
    base: str
    """The address that `/chat/completions` is added to."""
    model: str

    @property
    def variable(self) -> str:
        """The environment variable that may hold its key."""
        return re.sub(r"\W", "_", self.name).upper() + "_API_KEY"


def parse_other(text: str) -> Other:
    """From `NAME=URL,MODEL`; an address without a path gets OpenAI's `/v1`. Raises `BadRequest`,
    also for a key in the address: other users of the machine could read it."""
    name, _, rest = text.partition("=")
    url, _, model = rest.partition(",")
    parts = urlsplit(url)
    if not (re.fullmatch(r"[\w.-]+", name) and parts.scheme in ("http", "https") and model):
        raise BadRequest(f"--server {text!r} is no NAME=URL,MODEL", param="server")
    if name in (OURS, *PEERS):
        raise BadRequest(f"--server {name}: choose another name", param="server")
    base = url.rstrip("/") if parts.path.strip("/") else f"{url.rstrip('/')}/v1"
    other = Other(name, base, model)
    if "@" in parts.netloc or parts.query:
        raise BadRequest(
            f"--server {name}: no key in the address; it is read from {other.variable}",
            param="server",
        )
    return other


@dataclass(frozen=True)
class Plan:
    """The same plan asks the same questions."""

    parts: Sequence[str]
    model: str | None = None
    """A folder or Hub repository; none: random weights."""
    family: str = "llama"
    form: str = "4bit"
    hidden: int = 256
    layers: int = 6
    peers: Sequence[str] = tuple(PEERS)
    others: Sequence[Other] = ()
    streams: Sequence[int] = (1, 4, 16)
    crowd: int = 16
    words: int = 40
    """Of the shortest question; others have up to twice as many."""
    reply: int = 64
    prompt: int = 1000
    """Words of a long prompt."""
    rounds: int = 3
    limit: float = 120.0
    """Seconds for one request."""


@dataclass
class Row:
    """One server in one case; figures have a value for each round."""

    figures: dict[str, list[float | None]] = field(default_factory=dict)
    asked: int = 0
    refused: int = 0
    reason: str = ""
    """Of the last request that was refused."""
    compared: int = 0
    equal: int = 0
    cached: str = "-"

    def count(self, answers: Sequence[Answer], **figures: float | None) -> None:
        """Answers of one round, and its figures, which count if no answer failed."""
        failures = [answer.failure for answer in answers if answer.failure]
        self.asked += len(answers)
        self.refused += len(failures)
        self.reason = (failures or [self.reason])[-1]
        for name, value in figures.items():
            self.figures.setdefault(name, []).append(None if failures else value)

    def hold(self, answers: Sequence[Answer], alone: Sequence[Answer]) -> None:
        """Compare answers with those that the same server gives to the same requests alone."""
        for answer, truth in zip(answers, alone, strict=True):
            if not answer.failure and not truth.failure:
                self.compared += 1
                self.equal += answer.text.strip() == truth.text.strip()

    def report(self) -> Result:
        known = {name: [v for v in values if v] for name, values in self.figures.items()}
        return {
            **{name: median(values) if values else None for name, values in known.items()},
            "as_alone": f"{self.equal}/{self.compared}" if self.compared else "-",
            "refused": f"{self.refused}/{self.asked}",
            "cached": self.cached,
            "reason": self.reason,
        }


Rows = dict[str, dict[str, Row]]
"""By case and server."""


def row_of(rows: Rows, case: str, server: str) -> Row:
    return rows.setdefault(case, {}).setdefault(server, Row())


def in_turn(sides: Sequence[Client], turn: int) -> list[Client]:
    first = turn % max(1, len(sides))
    return [*sides[first:], *sides[:first]]


def questions(part: str, count: int, turn: int, words: int) -> list[Messages]:
    """`words` words to twice as many; no question is asked twice."""
    return [
        question(f"{part} {count} {turn} {at}", words * (2 + at % 3) // 2) for at in range(count)
    ]


def measure_answers(plan: Plan, sides: Sequence[Client]) -> Rows:
    """Whether requests in a batch get the answers that each gets alone, on the same server. In
    every second round the batch comes last: neither always finds its prompts in a prefix cache."""
    rows: Rows = {}
    for case, apart in ARRIVALS.items():
        for turn in range(plan.rounds):
            asked = questions(case, plan.crowd, turn, plan.words)
            for side in in_turn(sides, turn):
                alone = side.alone(asked, plan.reply) if turn % 2 else None
                together = side.together(asked, plan.reply, apart=apart)
                alone = alone or side.alone(asked, plan.reply)
                row = row_of(rows, f"{plan.crowd} {case}", side.name)
                row.count([*together, *alone])
                row.hold(together, alone)
    return rows


def measure_speed(plan: Plan, sides: Sequence[Client]) -> Rows:
    """Throughput of all streams; of the median stream its first token and its pace after it."""
    rows: Rows = {}
    for count in plan.streams:
        for side in sides:
            side.together(questions("warming", count, 0, plan.words), WARMING)
        for turn in range(plan.rounds):
            asked = questions("speed", count, turn, plan.words)
            for side in in_turn(sides, turn):
                began = time.perf_counter()
                answers = side.together(asked, plan.reply)
                seconds = time.perf_counter() - began
                paces = [answer.pace for answer in answers if answer.tokens > 1]
                row_of(rows, f"streams: {count}", side.name).count(
                    answers,
                    rate=sum(answer.tokens for answer in answers) / seconds,
                    first_token=median(answer.first for answer in answers),
                    pace=median(paces) if paces else None,
                )
    return rows


def measure_reuse(plan: Plan, sides: Sequence[Client]) -> Rows:
    """Time to first token of a long prompt, and of prompts that begin like it."""
    rows: Rows = {}
    for turn in range(plan.rounds):
        text = document(f"prefix {turn}", plan.prompt)
        for side in in_turn(sides, turn):

            def ask(case: str, *turns: str, side: Client = side, text: str = text) -> Answer:
                said = enumerate((text, "I have read it.", *turns))
                roles = ("user", "assistant")
                asked = [{"role": roles[at % 2], "content": content} for at, content in said]
                (answer,) = side.alone([asked], SHORT)
                row = row_of(rows, case, side.name)
                row.count([answer], first_token=answer.first)
                row.cached = f"{answer.cached} of {answer.prompt}"
                return answer

            first = ask("first time", "Which colour is the circle?")
            again = ask("once more", "Which colour is the circle?")
            row_of(rows, "once more", side.name).hold([again], [first])
            ask("other question", "And what is the weather like?")
            ask("next turn", "Which colour is the circle?", first.text, "And the weather?")
    return rows


PARTS: dict[str, Callable[[Plan, Sequence[Client]], Rows]] = {
    "answers": measure_answers,
    "speed": measure_speed,
    "reuse": measure_reuse,
}


def ratios(rows: Rows) -> Iterator[tuple[str, str, float]]:
    """(case, figure, ours over that of the best other server): the median of the rounds' ratios,
    above 1 in our favour, if both have answered every request."""
    for case, servers in rows.items():
        ours = servers.get(OURS)
        others = [row for name, row in servers.items() if name != OURS and not row.refused]
        for name, values in ours.figures.items() if ours and not ours.refused else ():
            found = [
                median(a / b if MORE_IS_BETTER[name] else b / a for a, b in pairs)
                for other in others
                if (pairs := [p for p in zip(values, other.figures[name], strict=True) if all(p)])
            ]
            if found:
                yield case, name, min(found)


def report_part(part: str, rows: Rows) -> Result:
    """Also prints a table."""
    best = {(case, name): value for case, name, value in ratios(rows)}
    found: Result = {case: {n: r.report() for n, r in each.items()} for case, each in rows.items()}
    for (case, name), value in best.items():
        found[case][OURS][f"{name}_to_best"] = value
    table = [
        {"case": case, "server": name} | row
        for case, each in found.items()
        for name, row in each.items()
    ]
    keys = dict.fromkeys(key for row in table for key in row)
    print_rows(part, {key: key for key in keys}, table)
    return found


def compare(plan: Plan, report: Callable[[str], None]) -> Result:
    """A table of each part goes to stderr. A server that does not start is named in `absent`.

    Raises `BadRequest`, `ModelNotFound`, `NotInstalled`, or `EngineUnavailable` if the proxy cannot
    start.
    """
    if plan.others and not plan.model:
        raise BadRequest("--server needs --model: the one that the server has", param="server")
    require_proxy()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as ending:
        folder = Path(scratch) / "model"
        if plan.model:
            folder = folder_of(plan.model)
        else:
            write_model(folder, plan.family, plan.form, plan.hidden, plan.layers)
        report("servers start")
        sides, absent = start_all(plan, folder, Path(scratch), ending)
        named = {"model": plan.model or plan.family, "format": "own" if plan.model else plan.form}
        result = surroundings(named["format"]) | named | {"absent": absent}
        for part in plan.parts:
            report(part)
            result[part] = report_part(part, PARTS[part](plan, sides))
        return result


def start_all(
    plan: Plan, folder: Path, logs: Path, ending: ExitStack
) -> tuple[list[Client], dict[str, str]]:
    """A client of each server that has answered once, and why others are absent."""
    absent: dict[str, str] = {}
    config = proxy_config(OURS, str(folder))
    config["router_settings"]["disable_cooldowns"] = True  # a server that fails is asked again
    variables = {**os.environ, **PROXIED}
    for name in plan.peers:
        arguments, own = PEERS[name]
        command = [Path(__file__).with_name("peer_process.py"), name, *arguments]
        log = logs / f"{name}.log"
        try:
            base = ending.enter_context(started(name, command, folder, own, log))
        except EngineUnavailable as error:
            absent[name] = error.message
            continue
        config["model_list"].append(_entry(plan, Other(name, f"{base}/v1", str(folder)), THINKING))
    for other in plan.others:
        variables[f"COMPARED_{other.variable}"] = os.environ.get(other.variable, "none")
        config["model_list"].append(_entry(plan, other, {}))
    with held():
        proxy = ending.enter_context(separate_gateway(config, variables)).proxy
    proxy.wait_ready()
    sides = []
    for entry in config["model_list"]:
        client = Client(entry["model_name"], proxy.url, proxy.key, START_LIMIT)
        ending.callback(client.close)
        try:  # some servers load their model with the first request
            client.ask([{"role": "user", "content": "Hello there, how are you?"}], WARMING)
        except RequestFailed as error:
            absent[client.name] = error.message
            continue
        client.limit = plan.limit
        sides.append(client)
    return sides, absent


def _entry(plan: Plan, other: Other, body: dict[str, Any]) -> dict[str, Any]:
    params = {
        "model": f"openai/{other.model}",
        "api_base": other.base,
        "api_key": "none" if body else f"os.environ/COMPARED_{other.variable}",
        "timeout": plan.limit + LATER,
        "stream_timeout": plan.limit + LATER,
        "max_retries": 0,
        "extra_body": body,
    }
    return {"model_name": other.name, "litellm_params": params}
