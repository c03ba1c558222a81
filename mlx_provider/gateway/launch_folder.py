"""The folder of one launch, with the same path at the next launch: agents write the path of their
settings into system prompts, so a new path would miss the prefix cache."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from ..client import runtime_folder
from ..client.runtime_folder import EngineLock
from ..config import runtime

LONGEST_NAME = 60


def first_folder(client: str, model: str, environ: Mapping[str, str]) -> Path:
    """The folder, unless another launch of this client and model runs."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{client}-{model}")
    return runtime(environ).folder / "launch" / name[: len(client) + 1 + LONGEST_NAME]


@contextmanager
def launch_folder(client: str, model: str, environ: Mapping[str, str]) -> Iterator[Path]:
    """An empty folder of this user only, removed with the block.

    It has the first name that no other launch locks. The kernel releases the lock of a killed
    launch, whose files are removed. Raises `EngineUnavailable` if the runtime folder cannot be
    used."""
    runtime_folder.prepare(runtime(environ))
    first = first_folder(client, model, environ)
    first.parent.mkdir(mode=0o700, exist_ok=True)
    folder, lock = next(_free(first))
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _lock_file(folder).unlink(missing_ok=True)
        lock.release()


def _free(first: Path) -> Iterator[tuple[Path, EngineLock]]:
    for number in count(1):
        folder = first if number == 1 else first.with_name(f"{first.name}.{number}")
        if (lock := EngineLock.try_take(_lock_file(folder))) is not None:
            yield folder, lock


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")
