"""An engine process that may open few files."""

import resource
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

FEW = 64


@pytest.fixture
def few_files() -> Any:
    """What is spawned may open `FEW` files for now, and as many as ever where it asks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def limit(pid: int) -> int:
    return resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="a limit of another process")
def test_a_low_limit_is_raised_where_that_is_possible(few_files: int, spawn: Any) -> None:
    assert limit(spawn().process.pid) == min(2048, few_files)


def test_an_engine_with_64_files_serves_many_connections(spawn: Any) -> None:
    engine = spawn(files=FEW)
    with ThreadPoolExecutor(8) as pool, ExitStack() as stack:
        answers = list(pool.map(lambda n: engine.lines(f"count {n} 0"), range(8)))
        assert all(answer[-1][-1]["type"] == "done" for answer in answers)
        for _ in range(100):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(str(engine.folder / "engine.sock"))
        assert engine.lines("count 3 0")
    assert engine.end(signal.SIGTERM) == 0
    assert "out of system resource" not in engine.process.stderr.read()


def test_too_few_files_are_one_line_with_the_remedy(spawn: Any) -> None:
    engine = spawn(files=24)
    assert engine.line.startswith("mlx-provider: this process may open 24 files and needs 48: ")
    assert engine.process.wait(300) == 1
