"""What drafts gain on our engine and on the peers' servers, over HTTP.

(mtp) the head of one checkpoint, beside mlx-vlm's server, which runs such heads. (model) a smaller
model that guesses for a larger one, beside mlx-lm's server; its weights are the larger one's first
layers, whose other ones add little, so that most guesses hold. Each server is asked the same
questions with and without drafts; the sides take turns within each round. What counts are ratios
within a round, and whether drafts change answers.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import mlx_provider
from draft_pair import write_pair
from mlx_provider.config import PREFIX
from mlx_provider.errors import EngineUnavailable
from mlx_provider_bench.report import Result, print_rows, surroundings
from peers import MLX_LM, MLX_VLM, Run, both, same
from servers import OURS, Client, Kind, Messages, Server, running
from stories import ask_all, short_stories

HYBRID = Path(mlx_provider.__file__).parent / "demo" / "hybrid"
"""The trained model in the package that has a head."""
LATE = 0.3
"""Share of the others' time after which a newcomer comes."""
SHORT: Messages = [{"role": "user", "content": "Hello."}]
NO_DRAFTS = {"drafts": False}


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    cases: Sequence[str] = ("mtp", "model")
    streams: Sequence[int] = (1, 4)
    reply: int = 96
    """Tokens of each answer, where the model does not end it."""
    rounds: int = 3
    hidden: int = 512
    layers: int = 12
    """Of the larger model."""
    first: int = 2
    """Of which the smaller one has the first."""
    dtype: str = "float32"
    head: Path = HYBRID


@dataclass
class Side:
    """One server, without drafts and with them."""

    name: str
    plain: Client
    drafted: Client
    runs: list[tuple[Run, Run]]
    late: list[tuple[float, float]]
    """Seconds until a newcomer's first token, without and with."""


def bench(plan: Plan) -> Result:
    """Run the plan; JSON-able. A table goes to stderr."""
    result: Result = surroundings(plan.dtype) | {"rows": [], "skipped": []}
    for case in plan.cases:
        with tempfile.TemporaryDirectory() as scratch:
            folder, ours, peer, options = CASES[case](plan, Path(scratch))
            with ExitStack() as servers:
                sides = [_ours(servers, ours, folder, Path(scratch))]
                try:
                    sides.append(_peer(servers, peer, options, folder, Path(scratch)))
                except EngineUnavailable as error:
                    why = error.message[:200]
                    result["skipped"].append({"drafts": case, "server": peer.name, "why": why})
                for count in plan.streams:
                    result["rows"] += [
                        {"drafts": case} | row for row in _measure(plan, count, sides)
                    ]
    print_rows("with drafts, over without", _TABLE, result["rows"])
    print_rows("not measured", {n: n for n in ("drafts", "server", "why")}, result["skipped"])
    return result


Case = tuple[Path, Kind, Kind, tuple[str, ...]]
"""The model's folder, our server, the peer's, and what tells that one to draft."""


def _head(plan: Plan, scratch: Path) -> Case:
    return plan.head, OURS, MLX_VLM, ("--draft-model", str(plan.head))


def _smaller(plan: Plan, scratch: Path) -> Case:
    folder, draft = write_pair(scratch, plan.dtype, plan.hidden, plan.layers, plan.first)
    granted = scratch / "models.toml"
    granted.write_text(f'["{folder}"]\ndrafter = "model"\ndraft_model = "{draft}"\n')
    told = {**OURS.environment, PREFIX + "MODELS_FILE": str(granted)}
    return folder, replace(OURS, environment=told), MLX_LM, ("--draft-model", str(draft))


CASES: Mapping[str, Callable[[Plan, Path], Case]] = {"mtp": _head, "model": _smaller}


def _ours(servers: ExitStack, kind: Kind, folder: Path, scratch: Path) -> Side:
    """One process for both: a request may have no drafts."""
    server = servers.enter_context(running(kind, folder, scratch / "ours.log"))
    return _side(servers, server, server, NO_DRAFTS)


def _peer(
    servers: ExitStack, kind: Kind, options: tuple[str, ...], folder: Path, scratch: Path
) -> Side:
    """Raises `EngineUnavailable`."""
    drafting = replace(kind, arguments=(*kind.arguments, *options))
    plain, drafted = (
        servers.enter_context(running(each, folder, scratch / f"{kind.name} {at}.log"))
        for at, each in enumerate((kind, drafting))
    )
    return _side(servers, plain, drafted, {})


def _side(servers: ExitStack, plain: Server, drafted: Server, said: Mapping[str, Any]) -> Side:
    clients = Client(plain, said), Client(drafted)
    for client in clients:
        servers.callback(client.close)
        client.try_ask(SHORT, 2)  # ours loads its model now
    return Side(plain.kind.name, *clients, [], [])


def _measure(plan: Plan, count: int, sides: Sequence[Side]) -> Iterator[Result]:
    for side in sides:
        side.runs, side.late = [], []
    for turn in range(1 + plan.rounds):
        asked = short_stories(count, turn)
        for side in [*sides[turn % len(sides) :], *sides[: turn % len(sides)]]:
            pair = [ask_all(client, asked, plan.reply) for client in (side.plain, side.drafted)]
            late = [
                _newcomer(c, asked, plan.reply, r)
                for c, r in zip((side.plain, side.drafted), pair, strict=True)
            ]
            if turn:  # in the first one policies learn and kernels are compiled
                side.runs.append((pair[0], pair[1]))
                side.late.append((late[0], late[1]))
    for side in sides:
        yield {"streams": count, "server": side.name} | _row(side)


def _newcomer(client: Client, asked: Sequence[Messages], reply: int, before: Run) -> float:
    """Seconds until the first token of one who comes while the same questions are answered."""

    def late() -> float:
        time.sleep(LATE * before.seconds)
        return client.try_ask(SHORT, 2).first

    return both(late, lambda: ask_all(client, asked, reply))[0]


def _row(side: Side) -> Result:
    pairs = [
        (one, other)
        for plain, drafted in side.runs
        for one, other in zip(plain.answers, drafted.answers, strict=True)
    ]
    failure = next((a.failure for pair in pairs for a in pair if a.failure), "")
    row: Result = {
        "plain": median(plain.rate for plain, _ in side.runs),
        "drafted": median(drafted.rate for _, drafted in side.runs),
        "gain": median(b.rate / a.rate if a.rate else 0.0 for a, b in side.runs),
        "newcomer": median(b / a for a, b in side.late),
        "same": f"{sum(same(b, a.text) and not b.failure for a, b in pairs)}/{len(pairs)}",
    }
    return row | ({"failed": failure[:100]} if failure else {})


_TABLE = {
    "drafts": "drafts",
    "streams": "streams",
    "server": "server",
    "tok/s without": "plain",
    "with": "drafted",
    "gain": "gain",
    "newcomer, times": "newcomer",
    "same answers": "same",
    "failed": "failed",
}
