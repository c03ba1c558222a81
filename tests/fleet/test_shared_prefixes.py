"""Two engines with one disk tier, behind a proxy that asks the least busy one."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from waiting import wait_until

PATIENCE = 60.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def fleet(start_fleet: Any, shared: Path) -> Any:
    variables = {"MLX_PROVIDER_DISK_CACHE": str(shared), "MLX_PROVIDER_DISK_CACHE_BYTES": "1G"}
    return start_fleet(proxies=1, redis=False, strategy="least-busy", **variables)


def test_a_new_session_goes_to_the_idle_engine(fleet: Any, session: Any) -> None:
    busy, new = session(10), session(11)
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(busy.turn, fleet, max_tokens=400, min_tokens=400)
        wait_until(lambda: any(_runs(each) for each in fleet.engines.values()))
        (name,) = (name for name, each in fleet.engines.items() if not _runs(each))
        assert new.turn(fleet).engine == name
        assert stream.result().whole
    assert new.turn(fleet).engine == name, "the session stays, though both are idle"


def test_a_session_that_moves_finds_its_prefix_on_the_shared_disk(
    fleet: Any, session: Any, shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, cold = session(1), session(2)
    one.messages = [{"role": "system", "content": "Kept on disk. " * 220}]
    cold.messages = [{"role": "system", "content": "Never seen yet. " * 190}]
    first = one.turn(fleet)
    assert first.whole
    assert one.turn(fleet).engine == first.engine
    _settled(shared)
    (name,) = fleet.engines.keys() - {first.engine}
    other = fleet.engines[name]
    wait_until(lambda: _files_known(other) >= len(list(shared.rglob("*.safetensors"))))
    fleet.engines[first.engine].end(signal.SIGKILL)
    assert fleet.ask([{"role": "user", "content": "Who is left?"}]).engine == name
    began = time.monotonic()
    moved = one.turn(fleet)
    read = time.monotonic() - began
    began = time.monotonic()
    again = cold.turn(fleet)
    computed = time.monotonic() - began
    assert moved.whole
    assert again.whole
    assert moved.engine == again.engine == name
    assert moved.cached > first.prompt - 64
    assert again.cached < 64
    with capsys.disabled():
        print(
            f"\n  moved: {moved.cached} of {moved.prompt} tokens from the shared folder, "
            f"answered in {read:.2f} s; {again.prompt} tokens computed: {computed:.2f} s",
            end="",
        )


def _runs(engine: Any) -> bool:
    return bool(engine.ask("/health")["running"])


def _files_known(engine: Any) -> int:
    return int(engine.ask("/cache")["disk"]["files"])


def _settled(folder: Path) -> None:
    """Nothing more has been written for a second."""
    deadline, before = time.monotonic() + PATIENCE, -1
    while (now := len(list(folder.rglob("*.safetensors")))) != before or not now:
        assert time.monotonic() < deadline, now
        before = now
        time.sleep(1)
