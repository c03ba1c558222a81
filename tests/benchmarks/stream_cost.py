"""Processor time of a server for a streamed token, beside other servers.

Each server has one process and the same tiny model, whose passes take little. Clients ask it over
TCP for chat streams. The processor time of the process, its threads and its children is divided by
the tokens. The servers take turns, so that each meets the same load of the machine. So does a
process that only runs mlx-lm's model, greedily, over as many rows: what no server can save.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from gateway_share import cpu_seconds
from mlx_provider_bench.report import Result, against, print_rows, surroundings
from peers import HELLO, MLX_LM, MLX_VLM, chat_pieces, gateway_request, through_proxy
from servers import OURS, Client, Kept
from stories import ask_all, short_stories
from tiny import build

SHARE = 0.5
"""Of the best other server's processor time that ours may take."""
RAPID = through_proxy("Rapid-MLX", images=False)
ALONE = "the model alone"
MODEL_ALONE = """
import sys, time
import mlx.core as mx
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

folder, rows, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = load(folder)[0]
for turn in range(2):  # the first one loads what there is to load
    cache = make_prompt_cache(model)
    tokens = mx.ones((rows, 30), mx.int32)
    before = time.process_time()
    for _ in range(steps):
        drawn = mx.argmax(model(tokens, cache=cache)[:, -1], axis=-1, keepdims=True)
        mx.async_eval(drawn)
        if tokens.shape[1] == 1:
            tokens.tolist()
        tokens = drawn
    tokens.tolist()
    seconds = time.process_time() - before
print(seconds / (rows * steps))
"""
"""A pass is launched before the tokens of the last one are read, as by mlx-lm's own loop."""


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    family: str = "qwen3"
    streams: Sequence[int] = (1, 8)
    reply: int = 400
    rounds: int = 5
    rapid: Path | None = None
    """The program `rapid-mlx`, in an environment of its own."""


class Program(Kept):
    """Rapid-MLX by its own program."""

    def __init__(self, program: Path, folder: Path, log: Path) -> None:
        super().__init__(RAPID, folder, log)
        self._program = program

    def command(self) -> list[str]:
        return [str(self._program), "serve", str(self.server.folder)]

    def _arguments(self) -> list[str]:
        return ["--host", "127.0.0.1", "--port", self.server.url.rpartition(":")[2]]


def bench(plan: Plan) -> Result:
    """Run the plan; JSON-able. A table goes to stderr."""
    result = surroundings("float32") | {"family": plan.family}
    with TemporaryDirectory() as place, ExitStack() as ending:
        folder = build(Path(place) / "model", plan.family, num_hidden_layers=1)
        kinds = (replace(OURS, request=gateway_request, read=chat_pieces), MLX_LM, MLX_VLM)
        servers = [Kept(kind, folder, Path(place) / kind.name) for kind in kinds]
        if plan.rapid is not None:
            servers.append(Program(plan.rapid, folder, Path(place) / RAPID.name))
        clients = {}
        for server in servers:
            ending.callback(server.stop)
            client = clients[server.kind.name] = Client(server.start())
            ending.callback(client.close)
            client.ask(HELLO, 4)
        kept = {server.kind.name: server for server in servers}
        result["rows"] = [
            row for count in plan.streams for row in _rows(plan, count, kept, clients, folder)
        ]
    print_rows("processor time for a streamed token", _TABLE, result["rows"])
    return result


def _rows(
    plan: Plan,
    count: int,
    servers: Mapping[str, Kept],
    clients: Mapping[str, Client],
    folder: Path,
) -> list[Result]:
    costs: dict[str, list[float]] = {name: [] for name in (*servers, ALONE)}
    for turn in range(plan.rounds + 1):
        for name, server in servers.items():
            found = _cost(server, clients[name], plan, count, turn)
            if turn:  # the first one has loaded what there is to load
                costs[name].append(found)
        if turn:
            costs[ALONE].append(_of_model(folder, count, plan.reply))
    medians = {name: median(each) for name, each in costs.items()}
    alone = medians.pop(ALONE)
    best = min(value for name, value in medians.items() if name != OURS.name)
    rows: list[Result] = [{"streams": count, "server": ALONE, "us": 1e6 * alone}]
    for name, value in medians.items():
        row: Result = {"streams": count, "server": name, "us": 1e6 * value}
        row["besides"] = 1e6 * (value - alone)
        if name == OURS.name:
            row["share"] = against(value / best, SHARE, at_least=False)
        rows.append(row)
    return rows


def _cost(server: Kept, client: Client, plan: Plan, count: int, turn: int) -> float:
    """Seconds of processor time for a token."""
    assert server.process is not None
    group = server.process.pid  # which each server leads
    before = _of_group(group)
    run = ask_all(client, short_stories(count, turn), plan.reply)
    tokens = sum(answer.tokens for answer in run.answers)
    failures = [answer.failure for answer in run.answers if answer.failure]
    if failures or not tokens:
        raise RuntimeError(f"{server.kind.name}: {failures or 'no tokens'}")
    return (_of_group(group) - before) / tokens


def _of_model(folder: Path, rows: int, steps: int) -> float:
    """Seconds of processor time for a token of a process that only runs the model."""
    command = [sys.executable, "-c", MODEL_ALONE, str(folder), str(rows), str(steps)]
    return float(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


def _of_group(group: int) -> float:
    """Processor time of a server and its children so far."""
    return sum(cpu_seconds(pid) for pid in _members(group))


def _members(group: int) -> list[int]:
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(entry.name)) == group:
                pids.append(int(entry.name))
        except ProcessLookupError:
            continue
    return pids or [group]  # macOS has no /proc


_TABLE = {
    "streams": "streams",
    "server": "server",
    "µs/token": "us",
    "besides the model": "besides",
    "of the best other": "share",
}
