"""`mlx.launch`, as ours runs it: it keeps no core busy while it waits for its ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from mlx_provider.upstream.launch import PAUSE, main, unhurried


@pytest.fixture
def pipes() -> Iterator[list[int]]:
    """Ends to read from and to write to: a rank's output, and its input."""
    ends = [*os.pipe(), *os.pipe()]
    yield ends
    for end in ends:
        os.close(end)


def test_a_rank_that_could_read_is_no_reason_to_look_at_once(pipes: list[int]) -> None:
    output, says, _, takes = pipes
    began = time.monotonic()
    assert unhurried([output], [takes], [], 1.0) == ([], [takes], [])
    assert time.monotonic() - began > 0.9 * PAUSE
    os.write(says, b"hello")
    assert unhurried([output], [takes], [], 1.0) == ([output], [takes], [])


def test_every_wait_of_the_launcher_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx._distributed_utils import launch

    seen = []
    monkeypatch.setattr(launch, "main", lambda: seen.append(launch.select))
    monkeypatch.setattr(launch, "select", launch.select)
    main()
    assert seen == [unhurried]
