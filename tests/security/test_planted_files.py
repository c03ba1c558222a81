"""Pipes, devices, sockets, folders, links and giants where a file of ours or a model belongs."""

import logging
import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from from_disk import flush
from mlx_provider.client.connection import LocalEngine
from mlx_provider.client.runtime_folder import EngineLock, holder
from mlx_provider.config import Runtime
from mlx_provider.engine.prefix_cache.disk import DiskTier
from mlx_provider.engine.prefix_cache.files import Header, disk_limit, write
from mlx_provider.errors import BadRequest, EngineUnavailable
from mlx_provider.families.checkpoint import read_json
from mlx_provider.safe_open import open_own, read_bounded, read_trusted
from mlx_provider.server.access import read_key
from mlx_provider.serving.hub import folder_of
from mlx_provider.serving.permissions import read_permissions
from schedules import Calls

T = TypeVar("T")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        before = Path.cwd()
        os.chdir(path.parent)  # the path of a socket has some hundred bytes
        try:
            listener.bind(path.name)
        finally:
            os.chdir(before)


def folder(path: Path) -> None:
    path.mkdir()


def loop(path: Path) -> None:
    path.symlink_to(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def unreadable(path: Path) -> None:
    path.write_text("{}")
    path.chmod(0)
    if os.getuid() == 0:
        os.chown(path, 12345, -1)


PLANTED = [pipe, unix_socket, folder, loop, device, unreadable]
planted = pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)


def in_time(work: Callable[[], T]) -> T:
    """What `work` returns or raises; fails where it never does."""
    outcome: list[T | Exception] = []

    def run() -> None:
        try:
            outcome.append(work())
        except (BadRequest, EngineUnavailable, OSError) as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(300)
    assert outcome, "hangs"
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


@planted
def test_the_disk_tier_ignores_files_that_are_not_regular_with_one_line(
    tmp_path: Path, plant: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "prefixes").mkdir(mode=0o700)
    for name in ("a", "b"):
        plant(tmp_path / "prefixes" / f"{name}.safetensors")
    with caplog.at_level(logging.WARNING):
        disk = in_time(lambda: DiskTier(tmp_path, 2**20, Calls()))
    in_time(disk.clear)
    disk.writer.close()
    assert len(caplog.records) == 1, caplog.text
    assert "2 files" in caplog.text
    left = list((tmp_path / "prefixes").glob("*.safetensors"))
    assert len(left) == 2 * (plant is folder), "which may hold what is not ours"


def test_a_giant_header_in_the_disk_tier_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "prefixes").mkdir(mode=0o700)
    with (tmp_path / "prefixes" / "a.safetensors").open("wb") as file:
        file.write((2**62).to_bytes(8, "little"))
        file.truncate(2**33)
    in_time(lambda: DiskTier(tmp_path, 2**20, Calls())).writer.close()
    assert not any((tmp_path / "prefixes").iterdir())


def test_a_sparse_file_does_not_change_the_disk_limit(tmp_path: Path) -> None:
    before = disk_limit(tmp_path, None)
    (tmp_path / "prefixes").mkdir(mode=0o700)
    with (tmp_path / "prefixes" / "a.safetensors").open("wb") as file:
        file.truncate(2**36)
    assert abs(disk_limit(tmp_path, None) - before) < 2**30


def test_a_lower_disk_limit_is_applied_at_the_start(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, 2**20, Calls())
    disk.writer.close()
    header = Header("p", 0, np.arange(8), True, [])
    path = write(disk.folder, header, {"0": np.zeros(2**16, np.uint8)}, disk.versions)
    later = DiskTier(tmp_path, 2**12, Calls())
    in_time(lambda: flush(later))
    assert not path.exists()
    assert later.report()["bytes"] == 0
    later.writer.close()


@pytest.mark.parametrize("by", ["link", "folder"])
def test_a_replaced_disk_tier_folder_is_not_written_to(
    tmp_path: Path, by: str, caplog: pytest.LogCaptureFixture
) -> None:
    disk, other = DiskTier(tmp_path, 2**20, Calls()), tmp_path / "elsewhere"
    in_time(lambda: flush(disk))
    other.mkdir()
    (other / "mine.safetensors").write_text("of its owner")
    disk.folder.rename(tmp_path / "away")
    disk.folder.symlink_to(other) if by == "link" else other.rename(disk.folder)
    header = Header("p", 0, np.arange(8), True, [])
    arrays = {"0": np.zeros(64, np.uint8)}
    disk.writer.do(partial(disk.writer.write, header, arrays, lambda: None))
    disk.clear()
    in_time(lambda: flush(disk))
    assert [each.name for each in disk.folder.iterdir()] == ["mine.safetensors"]
    assert "was replaced" in caplog.text
    disk.writer.close()


def test_a_file_in_place_of_the_disk_tier_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "prefixes").write_text("")
    with pytest.raises(BadRequest, match="cannot be used"):
        DiskTier(tmp_path, 2**20, Calls())


def test_a_disk_tier_writable_by_others_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "prefixes").mkdir()
    (tmp_path / "prefixes").chmod(0o777)
    tmp_path.chmod(0o777)
    DiskTier(tmp_path, 2**20, Calls()).writer.close()
    assert "could write in" in caplog.text
    assert "can replace" in caplog.text
    tmp_path.chmod(0o700)


@planted
@pytest.mark.parametrize("name", ["engine.log", "engine.lock"])
def test_an_irregular_log_or_lock_file_is_named_in_the_error(
    tmp_path: Path, plant: Callable[[Path], None], name: str
) -> None:
    tmp_path.chmod(0o700)
    plant(tmp_path / name)
    engine = LocalEngine(Runtime(tmp_path, {}), ("/nonexistent/python",), start_limit=1)
    with pytest.raises(EngineUnavailable, match=name):
        in_time(engine.ensure)


def test_a_pipe_in_place_of_the_engine_lock_is_refused(tmp_path: Path) -> None:
    pipe(tmp_path / "engine.lock")
    with pytest.raises(EngineUnavailable, match="no regular file"):
        in_time(lambda: EngineLock.try_take(tmp_path / "engine.lock"))
    assert in_time(lambda: holder(tmp_path / "engine.lock")) == "unknown"


@pytest.mark.parametrize("plant", [pipe, unix_socket, folder, loop, device])
def test_irregular_json_files_are_refused(tmp_path: Path, plant: Callable[[Path], None]) -> None:
    plant(tmp_path / "generation_config.json")
    with pytest.raises(BadRequest, match="generation_config"):
        in_time(lambda: read_json(tmp_path / "generation_config.json"))


def test_a_json_file_of_a_gigabyte_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(BadRequest, match="more than"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("plant", [pipe, unix_socket, device])
def test_other_irregular_files_are_refused(tmp_path: Path, plant: Callable[[Path], None]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert folder_of(str(tmp_path)) == tmp_path
    plant(tmp_path / "tokenizer.json")
    with pytest.raises(BadRequest, match=r"tokenizer\.json is no regular file"):
        folder_of(str(tmp_path))


def test_links_are_followed_for_model_files_but_not_for_engine_files(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "blob")
    assert read_bounded(tmp_path / "link", 2) == b"{}"
    with pytest.raises(OSError, match="symbolic links"):
        open_own(tmp_path / "link")


@planted
def test_irregular_owner_files_are_refused(plant: Callable[[Path], None], tmp_path: Path) -> None:
    plant(tmp_path / "owners")
    for read in (read_permissions, read_key):
        with pytest.raises(BadRequest, match="owners"):
            in_time(partial(read, tmp_path / "owners"))


def test_a_key_file_with_access_for_others_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x" * 9)
    file.chmod(0o640)
    assert read_trusted(file, 9, closed_to=0o022) == b"x" * 9
    with pytest.raises(OSError, match="more than 8 bytes"):
        read_trusted(file, 8, closed_to=0o022)
    with pytest.raises(PermissionError, match=f"`chmod 600 {file}`"):
        read_trusted(file, 9, closed_to=0o077)
