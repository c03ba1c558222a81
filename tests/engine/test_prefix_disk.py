"""The disk tier: restarts, crashes, damage, other versions, several processes."""

import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from agent_traffic import SyntheticModel, in_order
from from_disk import flush, restored
from integrity import check_integrity
from mlx_provider.engine.prefix_cache import files as prefix_files
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.prefix_cache.disk import DiskTier, Restore
from mlx_provider.engine.prefix_cache.files import STALE
from mlx_provider.engine.prefix_cache.snapshots import FORKS, RECENT
from mlx_provider.engine.prefix_cache.tree import CacheKey, as_ids
from mlx_provider.errors import BadRequest
from schedules import Calls

KEY = CacheKey("model", salt="tenant-secret")
PLENTY = 2**40
CALLS = Calls()
PLAIN, HYBRID = SyntheticModel("kv"), SyntheticModel("hybrid", state_units=4)


def store_on(folder: Path, *, limit: int = PLENTY, budget: int = PLENTY, versions=None, **more):
    disk = DiskTier(folder, limit, CALLS, versions=versions, **more)
    return PrefixCache(budget=lambda: budget, disk=disk)


def keep(prefix_cache, model, ids, ends=(), key=KEY) -> int:
    cache, length = restored(prefix_cache, CALLS, model, key, ids)
    at, states = length, {}
    for end in [e for e in (*ends, len(ids)) if e > at]:
        model.feed(cache, as_ids(ids), at, end)
        at = end
        if (state := prefix_cache.snapshot(cache)) is not None:
            states[end] = state
    prefix_cache.insert(key, ids, cache, states)
    check_integrity(prefix_cache)
    return length


def keep_on(folder: Path, model, ids, **more) -> None:
    """On disk alone: in a cache that closes."""
    with closing(store_on(folder, **more)) as prefix_cache:
        keep(prefix_cache, model, ids)


def reuse(prefix_cache, model, ids, key=KEY) -> int:
    """Number of tokens of a restored row, after a comparison with a cold one."""
    row, length = restored(prefix_cache, CALLS, model, key, ids)
    cold = model.make_cache()
    model.feed(cold, as_ids(ids), 0, length)
    for a, b in zip(row, cold, strict=True):
        if length and hasattr(a, "keys"):
            used = min(a.offset, getattr(a, "max_size", a.offset)) - 1
            for x, y in ((a.keys, b.keys), (a.values, b.values)):
                assert np.array_equal(_newest(a, x, used), _newest(b, y, used))
        elif length:
            assert np.array_equal(np.array(a[0]), np.array(b[0]))
    check_integrity(prefix_cache)
    return length


def _newest(layer, array, count) -> np.ndarray:
    ordered = in_order(layer, array) if hasattr(layer, "_idx") else array
    held = ordered.shape[2] if hasattr(layer, "_idx") else layer.offset
    return np.array(ordered[0, 0, held - count : held, 0])


@dataclass
class Rows:
    """Represents a model with one layer."""

    layer: Any

    def make_cache(self) -> list[Any]:
        return [self.layer()]


def files(folder: Path) -> list[Path]:
    return sorted((folder / "prefixes").glob("*.safetensors"))


@pytest.mark.parametrize("layers", ["kv", "window", "hybrid", "state"])
def test_prefixes_survive_a_restart(tmp_path, layers) -> None:
    model = SyntheticModel(layers, window=24, state_units=4)
    ids = list(range(1, 61))
    with closing(store_on(tmp_path)) as first:
        keep(first, model, ids[:40], ends=[10, 30])
        keep(first, model, ids, ends=[50])
        keep(first, model, [*ids[:45], *range(100, 120)], ends=[45])

    with closing(store_on(tmp_path)) as again:
        assert again.nbytes == 0
        assert reuse(again, model, [*ids, 900]) == 60
        assert reuse(again, model, [*ids[:45], *range(100, 120), 900]) == 65
        assert reuse(again, model, [*ids[:10], 900, 901]) == 10
        assert reuse(again, model, [800, 801]) == 0


def test_entries_evicted_from_memory_come_back_from_disk(tmp_path) -> None:
    ids = list(range(1, 61))
    prefix_cache = store_on(tmp_path)
    keep(prefix_cache, HYBRID, ids, ends=[30])
    prefix_cache.evict(0)  # immediately: a restore waits for pending writes
    assert reuse(prefix_cache, HYBRID, [*ids, 7]) == 60
    assert prefix_cache.nbytes == 0, "it goes straight into the row"


@pytest.mark.parametrize("layers", ["kv", "window", "hybrid"])
@pytest.mark.parametrize("budget", [0, 40_000])
def test_a_path_larger_than_the_budget_is_on_disk_as_a_whole(tmp_path, layers, budget) -> None:
    model = SyntheticModel(layers, window=16, state_units=30)
    ids = list(range(1, 10_001))
    with closing(store_on(tmp_path, budget=budget)) as first:
        keep(first, model, ids, ends=[3000, 5000])
    assert first.nbytes <= budget < len(ids) * model.unit
    with closing(store_on(tmp_path, budget=budget)) as again:
        assert reuse(again, model, [*ids, 7]) == len(ids)


def test_nothing_is_written_twice(tmp_path) -> None:
    ids = list(range(1, 61))
    for _ in range(3):
        with closing(store_on(tmp_path)) as prefix_cache:
            keep(prefix_cache, HYBRID, ids, ends=[30])
        sizes = [path.stat().st_size for path in files(tmp_path)]
    assert len(sizes) == 3  # a segment, states at 30 and 60


def test_branches_share_their_files(tmp_path) -> None:
    keep_on(tmp_path, PLAIN, list(range(1, 2001)))
    one = sum(path.stat().st_size for path in files(tmp_path))
    keep_on(tmp_path, PLAIN, [*range(1, 1501), 9000])
    assert sum(path.stat().st_size for path in files(tmp_path)) < one * 1.1
    with closing(store_on(tmp_path)) as prefix_cache:
        assert reuse(prefix_cache, PLAIN, [*range(1, 1501), 9000, 1]) == 1501
        assert reuse(prefix_cache, PLAIN, [*range(1, 2001), 1]) == 2000


def test_pruned_checkpoints_leave_the_disk_too(tmp_path) -> None:
    with closing(store_on(tmp_path)) as prefix_cache:
        ids: list[int] = []
        for turn in range(8):
            ids = [*ids, *range(1 + 20 * turn, 21 + 20 * turn)]
            keep(prefix_cache, HYBRID, ids)
    assert sum(".state." in path.name for path in files(tmp_path)) == 1 + RECENT + FORKS


def test_only_the_owner_can_read_the_files(tmp_path) -> None:
    keep_on(tmp_path, PLAIN, [1, 2, 3])
    assert stat.S_IMODE((tmp_path / "prefixes").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in files(tmp_path)} == {0o600}
    assert not any(b"tenant-secret" in path.read_bytes() for path in files(tmp_path))


def test_a_folder_that_is_a_link_is_refused(tmp_path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "prefixes").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadRequest, match="another user"):
        DiskTier(tmp_path, PLENTY, Calls())


def test_keys_do_not_share_files(tmp_path) -> None:
    keep_on(tmp_path, PLAIN, [1, 2, 3])
    with closing(store_on(tmp_path)) as prefix_cache:
        for other in (CacheKey("model"), CacheKey("other", salt="tenant-secret")):
            assert reuse(prefix_cache, PLAIN, [1, 2, 3, 4], key=other) == 0
        assert reuse(prefix_cache, PLAIN, [1, 2, 3, 4]) == 3
        assert len(files(tmp_path)) == 1  # files of another PLAIN stay


def test_other_versions_are_removed_with_one_line(tmp_path, caplog) -> None:
    with closing(store_on(tmp_path, versions="old")) as prefix_cache:
        keep(prefix_cache, HYBRID, [1, 2, 3], ends=[1, 2])
    with closing(store_on(tmp_path)) as prefix_cache:
        assert [r.message for r in caplog.records] == [
            f"prefix cache: 4 files in {tmp_path / 'prefixes'} ignored: removed: made by old, "
            f"this is {prefix_files.current_versions()}"
        ]
        assert reuse(prefix_cache, HYBRID, [1, 2, 3, 4]) == 0
        assert files(tmp_path) == []


def damage_data(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 255
    path.write_bytes(data)


def damage_tokens(path: Path) -> None:
    """Write a valid header with other tokens, which does not match the file name."""
    path.write_bytes(path.read_bytes().replace(b"[1, 2, 3, 4]", b"[1, 2, 3, 5]"))


def damage_start(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b", 0, [1,", b", 7, [1,"))


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def no_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 100)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    "damage", [damage_data, damage_tokens, damage_start, cut_short, no_header, empty]
)
def test_damage_is_ignored_with_one_line_and_removed(tmp_path, caplog, damage) -> None:
    keep_on(tmp_path, PLAIN, [1, 2, 3, 4])
    damage(files(tmp_path)[0])
    prefix_cache = store_on(tmp_path)
    assert reuse(prefix_cache, PLAIN, [1, 2, 3, 4, 5]) == 0
    assert reuse(prefix_cache, PLAIN, [1, 2, 3, 4, 5]) == 0
    assert len(caplog.records) == 1
    assert "removed" in caplog.text
    flush(prefix_cache.disk)
    assert files(tmp_path) == []
    # the prefix is computed and written again
    keep_on(tmp_path, PLAIN, [1, 2, 3, 4])
    assert len(files(tmp_path)) == 1


def test_the_folder_keeps_its_bound_and_evicts_the_least_recently_used(tmp_path) -> None:
    with closing(store_on(tmp_path)) as prefix_cache:
        for first in (1, 1000, 2000, 3000):
            keep(prefix_cache, PLAIN, list(range(first, first + 500)))
    size = files(tmp_path)[0].stat().st_size
    now = time.time()
    for path in files(tmp_path):
        os.utime(path, (now - 100, now - 100))
    with closing(store_on(tmp_path, limit=int(size * 4.5))) as prefix_cache:
        assert reuse(prefix_cache, PLAIN, list(range(1, 501))) == 499  # used, therefore kept
        keep(prefix_cache, PLAIN, list(range(4000, 4500)))
    disk = prefix_cache.disk
    assert disk.report()["bytes"] == sum(each.nbytes for each in disk.index.files.values())
    assert sum(path.stat().st_size for path in files(tmp_path)) <= size * 4.5
    with closing(store_on(tmp_path)) as prefix_cache:
        assert reuse(prefix_cache, PLAIN, list(range(1, 501))) == 499
        assert reuse(prefix_cache, PLAIN, list(range(4000, 4500))) == 499


def test_the_tail_of_a_path_is_evicted_before_its_head(tmp_path) -> None:
    keep_on(tmp_path, PLAIN, list(range(1, 6001)))
    total = sum(path.stat().st_size for path in files(tmp_path))
    keep_on(tmp_path, PLAIN, [9, 8, 7], limit=int(total * 0.9))
    with closing(store_on(tmp_path)) as prefix_cache:
        assert reuse(prefix_cache, PLAIN, list(range(1, 6002))) == 5120


def test_bfloat16_comes_back_bit_for_bit(tmp_path) -> None:
    values = mx.random.normal((1, 2, 5, 4), key=mx.random.key(1)).astype(mx.bfloat16)
    row = KVCache()
    row.update_and_fetch(values, values * 3)
    with closing(store_on(tmp_path)) as prefix_cache:
        prefix_cache.insert(KEY, [1, 2, 3, 4, 5], [row], {})
    with closing(store_on(tmp_path)) as prefix_cache:
        (again,), _ = restored(prefix_cache, CALLS, Rows(KVCache), KEY, [1, 2, 3, 4, 5, 6])
        assert again.keys.dtype == mx.bfloat16
        assert mx.array_equal(again.keys[..., :5, :], values).item()
        assert mx.array_equal(again.values[..., :5, :], values * 3).item()


def test_old_temporary_files_are_removed(tmp_path) -> None:
    folder = tmp_path / "prefixes"
    folder.mkdir()
    old, new = folder / "tmp_a", folder / "tmp_b"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 2 * STALE, time.time() - 2 * STALE))
    DiskTier(tmp_path, PLENTY, Calls()).writer.close()
    assert (old.exists(), new.exists()) == (False, True)


def test_an_entry_stored_before_a_restore_is_written_before_the_restore_reads(tmp_path) -> None:
    model, ids = SyntheticModel("hybrid"), as_ids(range(1, 601))
    with closing(store_on(tmp_path, budget=0)) as prefix_cache:
        disk = prefix_cache.disk
        keep(prefix_cache, model, ids[:300])
        fill = disk.fill(KEY, ids, lambda: prefix_cache.match(KEY, ids, 599), model.make_cache, 600)
        restore = Restore(disk, fill)
        flush(disk)
        disk.writer.do((slow := threading.Event()).wait)
        model.feed(cache := model.make_cache(), ids, 0, 599)
        prefix_cache.insert(KEY, ids[:599], cache, {})
        CALLS.run()
        slow.set()
        while not restore.ended:
            CALLS.run()
        assert restore.length == 599
    assert len(files(tmp_path)) == disk.report()["files"]


def test_a_removed_file_is_a_miss(tmp_path) -> None:
    """Another process may shrink the folder at any time."""
    keep_on(tmp_path, PLAIN, [1, 2, 3])
    with closing(store_on(tmp_path)) as prefix_cache:
        files(tmp_path)[0].unlink()
        assert reuse(prefix_cache, PLAIN, [1, 2, 3, 4]) == 0
        assert reuse(prefix_cache, PLAIN, [1, 2, 3, 4]) == 0


@pytest.mark.parametrize("reason", [OSError(28, "No space left"), MemoryError("No space left")])
def test_a_disk_failure_loses_only_the_entry(tmp_path, caplog, monkeypatch, reason) -> None:
    def full(*_args) -> None:
        raise reason

    monkeypatch.setattr(prefix_files, "write", full)
    prefix_cache = store_on(tmp_path)
    keep(prefix_cache, PLAIN, [1, 2, 3])
    flush(prefix_cache.disk)
    assert "No space left" in caplog.text
    while prefix_cache.report()["disk"]["files"]:
        CALLS.run()
    assert reuse(prefix_cache, PLAIN, [1, 2, 3, 4]) == 3


def test_clear_empties_the_folder(tmp_path) -> None:
    with closing(store_on(tmp_path)) as prefix_cache:
        keep(prefix_cache, PLAIN, [1, 2, 3])
        prefix_cache.clear()
    assert files(tmp_path) == []


CRASH = """
    import os, signal, sys
    from pathlib import Path
    from agent_traffic import SyntheticModel
    from from_disk import flush
    from mlx_provider.engine.prefix_cache import files as prefix_files
    from integrity import check_integrity
    from mlx_provider.engine.prefix_cache.disk import DiskTier
    from schedules import Calls
    from mlx_provider.engine.prefix_cache.tree import CacheKey, as_ids
    from mlx_provider.engine.prefix_cache.cache import PrefixCache

    model = SyntheticModel("kv")
    disk = DiskTier(Path(sys.argv[1]), 2**40, Calls())
    prefix_cache = PrefixCache(budget=lambda: 2**40, disk=disk)
    def put(ids):
        cache = model.make_cache()
        model.feed(cache, as_ids(ids), 0, len(ids))
        prefix_cache.insert(CacheKey("model", salt="tenant-secret"), ids, cache, {})
    put([1, 2, 3])
    flush(disk)
    # the last moment: everything is written, nothing renamed
    Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    put([5, 6, 7])
    disk.writer.close()
"""


def run_child(code: str, folder: Path) -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "MLX_DISABLE_COMPILE": "1"}
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(folder)], env=env)


def test_a_kill_between_write_and_rename_loses_only_the_unfinished_file(tmp_path) -> None:
    child = run_child(CRASH, tmp_path)
    assert child.wait(300) == -signal.SIGKILL
    assert len(list((tmp_path / "prefixes").glob("tmp*"))) == 1
    with closing(store_on(tmp_path)) as prefix_cache:
        assert reuse(prefix_cache, PLAIN, [1, 2, 3, 4]) == 3
        assert reuse(prefix_cache, PLAIN, [5, 6, 7, 8]) == 0
        keep(prefix_cache, PLAIN, [5, 6, 7])
    assert len(files(tmp_path)) == 2


COMPANY = """
    import sys
    from pathlib import Path
    from agent_traffic import SyntheticModel, Traffic, serve
    from integrity import check_integrity
    from mlx_provider.engine.prefix_cache.disk import DiskTier
    from schedules import Calls
    from mlx_provider.engine.prefix_cache.cache import PrefixCache

    model = SyntheticModel("hybrid", state_units=50)
    for round in range(2):
        disk = DiskTier(Path(sys.argv[1]), 150_000, Calls())
        prefix_cache = PrefixCache(budget=lambda: 40_000, disk=disk)
        for request in Traffic(round % 2).chat(2, 3, system=200):
            serve(prefix_cache, model, request)
            check_integrity(prefix_cache)
        prefix_cache.close()
"""


def test_two_processes_share_a_folder(tmp_path) -> None:
    """Both write equal and different files, and both remove files above the bound."""
    children = [run_child(COMPANY, tmp_path) for _ in range(2)]
    assert [child.wait(300) for child in children] == [0, 0]
    assert files(tmp_path)
    for path in files(tmp_path):
        prefix_files.read(path, prefix_files.current_versions())  # raises if damaged
    assert not list((tmp_path / "prefixes").glob("tmp*"))


def test_of_a_path_larger_than_the_folder_the_part_that_fits_is_written(tmp_path) -> None:
    keep_on(tmp_path, PLAIN, list(range(1, 6001)), limit=100_000)
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 100_000
    with closing(store_on(tmp_path)) as prefix_cache:
        assert reuse(prefix_cache, PLAIN, list(range(1, 6002))) == 2560
