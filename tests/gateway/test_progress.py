"""What a user sees of a load."""

import threading

from mlx_provider.errors import EngineUnavailable
from mlx_provider.gateway.engine import show_load
from mlx_provider.protocol.health import LoadingStats, Stats


def test_a_load_that_takes_time_is_told() -> None:
    def stats() -> Stats:
        if not looks:
            told.append(("over", ""))
            threading.Event().wait(0.01)
            return Stats(at=0, version="", device="", pid=1)
        found = looks.pop(0)
        if found is None:
            raise EngineUnavailable("none")
        return Stats(at=0, version="", device="", pid=1, loading=[found])

    weights = {"model": "qwen", "what": "weights", "total": 4_600_000_000, "unit": "bytes"}
    looks = [
        None,
        LoadingStats(**weights, done=0),
        LoadingStats(**weights, done=3_100_000_000),
        LoadingStats(**weights, done=3_100_000_000),
        LoadingStats(model="qwen", what="measuring the time of passes", done=2, total=4),
    ]
    told: list[tuple[str, str]] = []
    with show_load(stats, lambda *line: told.append(line), patience=0.001):
        while ("over", "") not in told:
            threading.Event().wait(0.01)
    lines = [what.rpartition(" (")[0] for phase, what in told if phase == "loading"]
    assert lines == [
        "the engine process starts",
        "qwen: weights, 0.0 of 4.6 GB",
        "qwen: weights, 3.1 of 4.6 GB",
        "qwen: measuring the time of passes, step 2 of 4",
    ]
