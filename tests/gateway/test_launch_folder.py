"""The folder of a launch: the same path each time, one launch at a time, nothing left."""

import signal
import stat
from pathlib import Path

import pytest

from mlx_provider.errors import EngineUnavailable
from mlx_provider.gateway.launch import first_folder, launch_folder
from python_process import run_python

KILLED = """
import os, signal, sys
from mlx_provider.gateway.launch import launch_folder
with launch_folder("claude", "demo", os.environ) as folder:
    (folder / "key").write_text("secret")
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    runtime = tmp_path / "runtime"
    monkeypatch.setenv("MLX_PROVIDER_RUNTIME_DIR", str(runtime))
    return {"MLX_PROVIDER_RUNTIME_DIR": str(runtime)}


def test_a_launch_folder_has_the_same_path_each_time_and_is_emptied(own: dict[str, str]) -> None:
    paths = []
    for _ in range(2):
        with launch_folder("claude", "demo", own) as folder:
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert list(folder.iterdir()) == []
            (folder / "key").write_text("secret")
            paths.append(folder)
        assert list(folder.parent.iterdir()) == []
    assert paths == [first_folder("claude", "demo", own)] * 2


def test_concurrent_launches_use_separate_folders_with_stable_paths(own: dict[str, str]) -> None:
    def both() -> list[Path]:
        with (
            launch_folder("claude", "demo", own) as one,
            launch_folder("claude", "demo", own) as two,
        ):
            assert one.is_dir()
            assert two.is_dir()
            return [one, two]

    first = both()
    assert len({*first}) == 2
    assert both() == first


def test_the_folder_of_a_killed_launch_is_emptied_and_reused(own: dict[str, str]) -> None:
    left = Path(run_python(KILLED, status=-signal.SIGKILL).stdout.strip())
    assert (left / "key").exists()
    with launch_folder("claude", "demo", own) as folder:
        assert folder == left
        assert list(folder.iterdir()) == []


def test_each_client_and_model_has_a_separate_launch_folder(
    own: dict[str, str],
) -> None:
    names = [("claude", "demo"), ("claude", "demo-hybrid"), ("codex", "demo"), ("claude", "../x/y")]
    names.append(("claude", "x" * 5000))
    folders = [first_folder(*name, own) for name in names]
    assert len({*folders}) == len(folders)
    assert {folder.resolve().parent for folder in folders} == {folders[0].parent.resolve()}
    with launch_folder(*names[-1], own):
        pass


def test_a_launch_folder_open_to_others_is_refused(own: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir(mode=0o755)
    with (
        pytest.raises(EngineUnavailable, match="open to other users"),
        launch_folder("a", "b", own),
    ):
        pass
