"""One rank of a server under measurement, as a launcher starts it.

`python program.py SIDE TALLY PART ARGUMENT...`; SIDE: `ours` is our
engine over HTTP, whose other ranks follow; `theirs` mlx-lm's server; `alone` times collectives.
PART: `whole`, or `apart` for ranks whose models do not wait for one another: what they add up
stays their own, so texts mean nothing and each rank computes as much as before. Without a
launcher it is one process.
"""

from __future__ import annotations

import json
import os
import runpy
import socketserver
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ranked.tally import Tally

CHAIN = 50
"""Collectives of one graph, each of which waits for the one before."""
REPEATS = 5


def main(arguments: list[str]) -> None:
    side, tally, part, *rest = arguments
    _leave_stdin()
    from mlx_provider.upstream import blas

    blas.preload()
    first = os.environ.get("MLX_RANK", "0") == "0"
    if side == "alone":
        _time_collectives(Path(tally), json.loads(rest[0]))
        return
    count(Tally(Path(tally)) if first else None, apart=part == "apart")
    {"ours": _ours, "theirs": _theirs}[side](rest, first)


def _leave_stdin() -> None:
    """Else `mlx.launch` (mlx 0.32.4, `_launch_with_io`) keeps a core busy asking whether this
    process could take input; it stops once it has some and finds nobody."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def count(tally: Tally | None, *, apart: bool) -> None:
    """Let this process count its passes and collectives, and with `apart` leave out those of the
    model, which are those of floats."""
    import mlx.core as mx
    from mlx_lm.models.llama import Model

    added, passed = mx.distributed.all_sum, Model.__call__

    def all_sum(x: Any, **more: Any) -> Any:
        own = isinstance(x, mx.array) and mx.issubdtype(x.dtype, mx.floating)
        if tally is not None:
            tally.add("model_calls" if own else "other_calls")
            tally.add("model_bytes" if own else "other_bytes", getattr(x, "nbytes", 4))
        return x if own and apart else added(x, **more)

    def call(self: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        if tally is not None:
            tally.passed(time.perf_counter(), *inputs.shape[:2])
        return passed(self, inputs, *rest, **more)

    mx.distributed.all_sum = all_sum
    Model.__call__ = call
    if tally is not None:
        _count_messages(tally)


def _count_messages(tally: Tally) -> None:
    from mlx_provider_ranks import channel

    names = vars(channel)
    frame, tell = names["frame"], channel.LeaderChannel.tell

    def framed(message: Any) -> bytes:
        data: bytes = frame(message)
        tally.add("message_bytes", len(data))
        return data

    def told(self: Any, message: Any, *, more: bool = False) -> None:
        began = time.perf_counter()
        tell(self, message, more=more)
        tally.add("tell_seconds", time.perf_counter() - began)
        tally.add("messages")

    names["frame"] = framed
    channel.LeaderChannel.tell = told  # type: ignore[method-assign]


def _theirs(arguments: list[str], first: bool) -> None:
    # Of many who come at once, Python's own server refuses all but five.
    socketserver.TCPServer.request_queue_size = 128
    sys.argv = ["mlx_lm.server", *arguments]
    runpy.run_module("mlx_lm.server", run_name="__main__", alter_sys=True)


def _ours(arguments: list[str], first: bool) -> None:
    from mlx_provider.config import engine_settings
    from mlx_provider.errors import ProcessLost
    from mlx_provider.registry import PluginRegistry
    from mlx_provider.server.__main__ import main as serve
    from mlx_provider.server.run import end_process
    from mlx_provider_ranks.group import follow

    if not first:
        try:
            follow(engine_settings(), PluginRegistry.discover())
        except ProcessLost as error:
            sys.stderr.write(f"{error.message}\n")
        end_process(0)
    end_process(serve(arguments, _leading if "MLX_RANK" in os.environ else None))


def _leading(settings: Any, deliver: Any) -> Any:
    from mlx_provider.registry import PluginRegistry
    from mlx_provider.serving.service import ChatService
    from mlx_provider_ranks.group import lead

    registry = PluginRegistry.discover()
    ranks, _ = lead(settings, registry, _lost)
    return ChatService(settings, deliver, registry, ranks)


def _lost(fault: Any) -> None:
    sys.stderr.write(f"{fault.error().message}\n")
    sys.stderr.flush()
    os._exit(1)


def _time_collectives(path: Path, shapes: list[tuple[list[int], str]]) -> None:
    """Seconds of one, of each shape: in a graph of many, and evaluated by itself."""
    import mlx.core as mx

    group = mx.distributed.init(strict=True)
    found = []
    for shape, dtype in shapes:
        start = mx.zeros(shape, getattr(mx, dtype))
        step = lambda x: mx.distributed.all_sum(x, group=group)  # noqa: E731
        found.append([_timed(start, step, CHAIN), _timed(start, step, 1)])
    if group.rank() == 0:
        path.write_text(json.dumps(found))


def _timed(start: Any, step: Callable[[Any], Any], chain: int) -> float:
    """The fastest of a few rounds: others of the machine only add."""
    import mlx.core as mx

    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(CHAIN // chain):
            x = start
            for _ in range(chain):
                x = step(x)
            mx.eval(x)
        taken.append((time.perf_counter() - began) / CHAIN)
    return min(taken)


if __name__ == "__main__":
    main(sys.argv[1:])
