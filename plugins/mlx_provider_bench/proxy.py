"""`mlx-provider bench proxy`: our engine beside mlx-lm's and mlx-vlm's servers, behind one LiteLLM.

What a client sees, for each family and format of weights and each number of streams: tokens per
second of all streams together, time to first token, and how many answers in company equal those
that the same server gives to the same question alone. The sides take turns within each round,
since a machine drifts, and are asked the same questions; each round asks new ones. What counts are
ratios within a round. The models have random weights, and an answer always has its full length.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from mlx_provider.errors import BadRequest

from .models.random_weights import WORDS, write_model
from .report import Result, against, print_rows, surroundings
from .servers.client import Answer, Client, Messages
from .servers.gateway import NATIVE, gateway
from .servers.processes import OURS, PEERS
from .servers.questions import same

FORMATS = ("float32", "bfloat16", "4bit")
"""`4bit`: quantised in groups of 64, the rest in bfloat16."""
FAMILIES = ("llama", "qwen3_5")
"""Attention alone, and a hybrid of attention and recurrent layers."""
STREAMS = (1, 4, 16)
GROUP = 64
MANY = 16
"""Streams from which on batching has to pay."""
RATES = {True: 1.3, False: 1.0}
"""Times the best peer's throughput that is wanted of ours, with many streams and with few."""


@dataclass(frozen=True)
class Plan:
    """What is measured, and how large."""

    families: Sequence[str] = FAMILIES
    formats: Sequence[str] = FORMATS
    streams: Sequence[int] = STREAMS
    words: int = 40
    """Of the shortest question; others have up to twice as many."""
    reply: int = 64
    """Tokens of each answer."""
    rounds: int = 3
    hidden: int = 256
    layers: int = 6
    peers: bool = False


@dataclass(frozen=True)
class Run:
    """Questions asked of one side at the same time."""

    answers: Sequence[Answer]
    seconds: float

    @property
    def rate(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds

    @property
    def first(self) -> float:
        return median(answer.first for answer in self.answers)


@dataclass
class Side:
    """What one side did with one number of streams, round by round."""

    runs: list[Run]
    equal: int = 0
    asked: int = 0
    failure: str = ""


Sides = dict[tuple[str, int], Side]
"""By server and streams."""


def bench(plan: Plan) -> Result:
    """Run the plan; JSON-able. A table goes to stderr. Raises `BadRequest`."""
    unknown = sorted({*plan.formats} - {*FORMATS})
    if unknown:
        raise BadRequest(f"no such format: {', '.join(unknown)}; {FORMATS}", param="format")
    result = surroundings(", ".join(plan.formats)) | {"hidden": plan.hidden, "layers": plan.layers}
    result |= {"rows": [], "skipped": []}
    for family in plan.families:
        for form in plan.formats:
            with tempfile.TemporaryDirectory() as scratch:
                folder = write(Path(scratch) / "model", family, form, plan.hidden, plan.layers)
                _measure(plan, {"family": family, "format": form}, folder, result)
    print_rows("behind one LiteLLM proxy", _TABLE, result["rows"])
    print_rows("not measured", {name: name for name in _SKIPPED}, result["skipped"])
    return result


def write(folder: Path, family: str, form: str, hidden: int, layers: int) -> Path:
    """A model folder in one of `FORMATS`."""
    from mlx_provider.testing.quantised import quantise

    if form != "4bit":
        return write_model(folder, family, form, hidden, layers)
    path = write_model(folder, family, "bfloat16", hidden, layers)
    return quantise(path, family, group=GROUP)


def _measure(plan: Plan, head: Result, folder: Path, result: Result) -> None:
    native = head["format"] != "float32"
    with gateway(folder, PEERS if plan.peers else (), native=native) as (clients, skipped):
        sides: Sides = {
            (client.server.model, streams): Side([])
            for streams in plan.streams
            for client in clients
        }
        for turn in range(plan.rounds):
            _round(plan, turn, clients, sides)
    result["skipped"] += [head | {"server": each.name, "why": each.why[:200]} for each in skipped]
    result["rows"] += [head | row for row in rows(plan.streams, sides)]


def _round(plan: Plan, turn: int, clients: Sequence[Client], sides: Sides) -> None:
    """Every side with every number of streams, another one first each time.

    In the first round the questions are asked again, one by one.
    """
    first = turn % len(clients)
    for streams in plan.streams:
        asked = questions(plan, streams, turn)
        for client in [*clients[first:], *clients[:first]]:
            side = sides[client.server.model, streams]
            began = time.perf_counter()
            answers = client.ask_together(asked, plan.reply)
            side.runs.append(Run(answers, time.perf_counter() - began))
            if turn == 0:
                alone = [client.try_ask(each, plan.reply) for each in asked]
                side.equal += sum(map(_equal, answers, alone))
                side.asked += len(asked)
                answers += alone
            side.failure = next((a.failure for a in answers if a.failure), side.failure)


def _equal(answer: Answer, alone: Answer) -> bool:
    return not answer.failure and not alone.failure and same(answer, alone.text)


def questions(plan: Plan, streams: int, turn: int) -> list[Messages]:
    """Of unlike lengths, no two alike in any round."""
    dice = random.Random(f"{streams} {turn}")  # noqa: S311
    lengths = [max(4, plan.words * (2 + i % 3) // 2) for i in range(streams)]
    return [
        [{"role": "user", "content": " ".join(dice.choice(WORDS) for _ in range(length))}]
        for length in lengths
    ]


def questions_of(count: int, turn: int) -> list[Messages]:
    """Short ones that the demo models answer at length, no two alike."""
    words = [WORDS[(7 * turn + at) % len(WORDS)] for at in range(count)]
    return [[{"role": "user", "content": f"Tell me a story. {word}"}] for word in words]


def rows(streams: Sequence[int], sides: Sides) -> Iterator[Result]:
    """One for each number of streams and side, ours beside the best peer of each round."""
    for count in streams:
        here = {name: side for (name, n), side in sides.items() if n == count}
        peers = [side for name, side in here.items() if not _is_ours(name) and not side.failure]
        for name, side in here.items():
            yield {"streams": count, "server": name} | _row(count, side, peers, _is_ours(name))


def _is_ours(name: str) -> bool:
    return name in (OURS.name, NATIVE)


def _row(streams: int, side: Side, peers: Sequence[Side], ours: bool) -> Result:
    percent = 100 * side.equal / max(1, side.asked)
    row: Result = {
        "tokens_per_second": median(run.rate for run in side.runs),
        "first_token_seconds": median(run.first for run in side.runs),
        "answers": f"{side.equal}/{side.asked}",
        "as_alone_percent": against(percent, 100, at_least=True) if ours else round(percent, 1),
    }
    if side.failure:
        row["failed"] = side.failure[:100]
    if ours and peers:
        rounds = [(own, [peer.runs[i] for peer in peers]) for i, own in enumerate(side.runs)]
        rate = median(own.rate / max(p.rate for p in others) for own, others in rounds)
        first = median(own.first / min(p.first for p in others) for own, others in rounds)
        row["rate_over_best_peer"] = against(rate, RATES[streams >= MANY], at_least=True)
        row["first_over_best_peer"] = against(first, 1.0, at_least=False)
    return row


_TABLE: dict[str, Any] = {
    "family": "family",
    "format": "format",
    "streams": "streams",
    "server": "server",
    "tokens/s": "tokens_per_second",
    "first token s": "first_token_seconds",
    "rate/best peer": "rate_over_best_peer",
    "first/best peer": "first_over_best_peer",
    "as alone %": "as_alone_percent",
    "answers": "answers",
    "failed": "failed",
}
_SKIPPED = ("family", "format", "server", "why")
