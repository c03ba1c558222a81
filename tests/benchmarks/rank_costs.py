"""What sharing a model costs, beside mlx-lm's server.

Each number of ranks is started anew, ours and theirs by the same launcher over the same folder, and
asked the same prompts. The time in collectives is found by leaving them out: the same server, whose
models do not wait for one another (`program`), computes as much, and what its step is faster by was
theirs. Steps are taken from rank 0's passes, which are counted alike on both sides.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlx_provider.errors import EngineUnavailable
from mlx_provider_bench.models.random_weights import write_format
from mlx_provider_bench.report import Result, against, print_rows, surroundings
from mlx_provider_bench.servers.client import Answer, Client, Messages
from mlx_provider_bench.servers.client import Run as Answers
from mlx_provider_bench.servers.processes import MLX_LM, OURS, Kind
from ranked.launched import Group, Part, time_collectives
from ranked.plan import Plan
from ranked.tally import Seen, step_seconds
from stories import ask_all, short_stories

SIDES: dict[str, Kind] = {"ours": OURS, "theirs": MLX_LM}
NOT_SLOWER = 1.0


@dataclass(frozen=True)
class Round:
    """Questions at once, and what rank 0 counted meanwhile."""

    answers: Answers
    counts: dict[str, float]
    step: float | None
    """Seconds from one decode pass of all rows to the next."""


def bench(plan: Plan) -> Result:
    """Run the plan; JSON-able. Tables go to stderr.

    Raises `BadRequest` for ranks that cannot share the model, `EngineUnavailable`.
    """
    plan.check()
    with tempfile.TemporaryDirectory(prefix="mlxp-ranks-") as scratch:
        root = Path(scratch)
        model = write_format(root / "model", "llama", plan.format, plan.hidden, plan.layers)
        rows, texts = [], Texts()
        for ranks in plan.ranks:
            rows += _rows(plan, ranks, model, root, texts)
        alone = [each for ranks in plan.ranks if ranks > 1 for each in _alone(plan, ranks, root)]
    print_rows("one model over several ranks", COLUMNS, rows)
    print_rows("one sum over all ranks", ALONE_COLUMNS, alone)
    about = surroundings(plan.format)
    return about | {"plan": asdict(plan), "rows": rows, "collectives": alone}


COLUMNS = {
    "ranks": "ranks",
    "streams": "streams",
    "server": "server",
    "tokens/s": "tokens_per_second",
    "first token, s": "first_token",
    "step, ms": "step_ms",
    "without collectives": "apart_ms",
    "in collectives": "collectives_ms",
    "to theirs": "collectives_to_theirs",
    "step to theirs": "step_to_theirs",
    "messages/step": "messages",
    "bytes/step": "message_bytes",
    "tell, ms/step": "tell_ms",
    "other sums/step": "other_calls",
    "as one process": "equal",
}
ALONE_COLUMNS = {
    "ranks": "ranks",
    "sum of": "what",
    "bytes": "bytes",
    "in a graph, ms": "chained_ms",
    "by itself, ms": "single_ms",
}


class Texts:
    """Answers of the first server that was asked, by question."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}

    def equal(self, questions: Sequence[Messages], answers: Sequence[Answer]) -> str:
        """How many are as they were: `n/m`."""
        pairs = [
            (self._first.setdefault(str(question), answer.text), answer.text)
            for question, answer in zip(questions, answers, strict=True)
        ]
        return f"{sum(one == other for one, other in pairs)}/{len(pairs)}"


def _rows(plan: Plan, ranks: int, model: Path, root: Path, texts: Texts) -> list[Result]:
    """Of one number of ranks: a row for each number of streams and each server."""
    sides = list(SIDES) if plan.peers else ["ours"]
    measured = {side: _measure(plan, side, ranks, "whole", model, root) for side in sides}
    apart = {
        side: _measure(plan, side, ranks, "apart", model, root) if ranks > 1 else {}
        for side in sides
    }
    rows = []
    for streams in plan.streams:
        pair = [
            _row(plan, side, ranks, streams, measured[side], apart[side], texts) for side in sides
        ]
        _compare(pair)
        rows += pair
    return rows


def _measure(
    plan: Plan, side: str, ranks: int, part: Part, model: Path, root: Path
) -> dict[int, list[Round]]:
    """Rounds by number of streams, of one start."""
    sys.stderr.write(f"{side}, ranks {ranks}, {part} ...\n")
    group = Group(SIDES[side], side, ranks, part, model, root / f"{side}-{ranks}-{part}")
    try:
        client = Client(group.start())
        client.ask(questions(1, -1)[0], 4)  # the model loads
        found = {
            streams: [_round(client, group, plan, streams, turn) for turn in range(plan.rounds)]
            for streams in plan.streams
        }
        client.close()
    finally:
        group.stop()
    return found


def questions(streams: int, turn: int) -> list[Messages]:
    """No two that are alike in a run, so that nobody has their prompts."""
    return [
        [{"role": "user", "content": f"{streams}.{turn}.{at}: {story[-1]['content']}"}]
        for at, story in enumerate(short_stories(streams, turn))
    ]


def _round(client: Client, group: Group, plan: Plan, streams: int, turn: int) -> Round:
    before = group.tally.seen()
    answers = ask_all(client, questions(streams, turn), plan.tokens)
    after = group.tally.seen()
    failed = next((each.failure for each in answers.answers if each.failure), "")
    if failed:
        raise EngineUnavailable(f"{client.server.kind.name}: {failed}")
    return Round(answers, after.since(before), _step(group, before, after, streams))


def _step(group: Group, before: Seen, after: Seen, streams: int) -> float | None:
    return step_seconds(group.tally.passes(before, after), streams)


def _row(
    plan: Plan,
    side: str,
    ranks: int,
    streams: int,
    whole: dict[int, list[Round]],
    apart: dict[int, list[Round]],
    texts: Texts,
) -> Result:
    rounds = whole[streams]
    asked = [each for turn in range(plan.rounds) for each in questions(streams, turn)]
    answers = [each for one in rounds for each in one.answers.answers]
    row = {
        "ranks": ranks,
        "streams": streams,
        "server": SIDES[side].name,
        "tokens_per_second": max(each.answers.rate for each in rounds),
        "first_token": min(each.answers.first for each in rounds),
        "step_ms": _fastest(rounds),
        "equal": texts.equal(asked, answers),
    }
    if ranks > 1:
        row |= _shared(row["step_ms"], rounds, apart[streams])
    return row


def _fastest(rounds: Sequence[Round]) -> float | None:
    steps = [each.step for each in rounds if each.step is not None]
    return min(steps) * 1e3 if steps else None


def _shared(step: Any, rounds: Sequence[Round], apart: Sequence[Round]) -> Result:
    """What ranks add to a row; counts are of one pass, prefill included."""
    alone = _fastest(apart)
    passes = sum(each.counts["passes"] for each in rounds)
    total = {name: sum(each.counts[name] for each in rounds) / passes for name in rounds[0].counts}
    return {
        "apart_ms": alone,
        "collectives_ms": None if step is None or alone is None else step - alone,
        "model_calls": total["model_calls"],
        "model_bytes": total["model_bytes"],
        "other_calls": total["other_calls"],
        "other_bytes": total["other_bytes"],
        "messages": total["messages"],
        "message_bytes": total["message_bytes"],
        "tell_ms": total["tell_seconds"] * 1e3,
    }


def _compare(pair: Sequence[Result]) -> None:
    """Ours beside theirs, where both have a figure; one below zero is the machine's noise."""
    if len(pair) < 2:
        return
    ours, theirs = pair
    for name, key in (
        ("step_to_theirs", "step_ms"),
        ("collectives_to_theirs", "collectives_ms"),
    ):
        mine, other = ours.get(key), theirs.get(key)
        if mine is not None and other is not None and min(mine, other) > 0:
            ours[name] = against(mine / other, NOT_SLOWER, at_least=False)


def _alone(plan: Plan, ranks: int, root: Path) -> list[Result]:
    """Sums of the sizes that steps have, with nothing else to do."""
    kinds = [("hidden states", [streams, plan.hidden], "float32", 4) for streams in plan.streams]
    kinds += [("tokens", [streams], "int32", 4) for streams in plan.streams]
    shapes = [(shape, dtype) for _, shape, dtype, _ in kinds]
    taken = time_collectives(ranks, shapes, root / f"alone-{ranks}")
    return [
        {
            "ranks": ranks,
            "what": f"{what}, {shape[0]} rows",
            "bytes": _size(shape) * width,
            "chained_ms": chained * 1e3,
            "single_ms": single * 1e3,
        }
        for (what, shape, _, width), (chained, single) in zip(kinds, taken, strict=True)
    ]


def _size(shape: Sequence[int]) -> int:
    return shape[0] * shape[1] if len(shape) > 1 else shape[0]
