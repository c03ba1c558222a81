"""Memory of the machine, its folders, and the settings of the environment."""

from __future__ import annotations

import difflib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..client.connection import TRANSPORT
from ..client.runtime_folder import inspect
from ..config import PREFIX, SETTINGS, EngineSettings, removed_variables
from ..engine.memory import memory_limit, pool_limit
from ..engine.prefix_cache.disk_limit import disk_limit, held
from ..errors import BadRequest, EngineUnavailable
from ..gateway.models import size
from ..protocol.options import ModelOptions
from ..registry.discovery import SELECTION
from ..serving.drafting import UNNAMED
from ..serving.grants import read_grants
from ..serving.hub import cache_root
from .findings import Finding
from .subject import Subject

LEAST_BYTES = 4 * 10**9
"""Bytes below which no useful model fits."""
OTHER_VARIABLES = (SELECTION, TRANSPORT, PREFIX + "RUNTIME_DIR", PREFIX + "API_KEY")
VARIABLES = frozenset([*(PREFIX + name.upper() for name in SETTINGS), *OTHER_VARIABLES])


def room(settings: EngineSettings) -> int:
    """Bytes for weights and rows together: the limit without MLX's pool of free buffers."""
    limit = memory_limit(settings.memory_limit)
    return limit - pool_limit(limit)


def memory(subject: Subject) -> Iterator[Finding]:
    """What weights, requests and MLX's free buffers may take together."""
    limit = memory_limit(subject.settings.memory_limit)
    pool = pool_limit(limit)
    summary = f"{size(limit)} for models and requests, {size(pool)} of it for free buffers"
    if limit < LEAST_BYTES:
        remedy = f"close other programs, or raise {PREFIX}MEMORY_LIMIT"
        yield Finding("memory.limit", "warn", f"{summary}: few models of use fit", remedy)
    else:
        yield Finding("memory.limit", "ok", summary)


def wired(subject: Subject) -> Iterator[Finding]:
    """The limit of wired memory on a Mac."""
    if not subject.system.is_mac:
        return
    limit = subject.wired()
    if limit == 0:
        yield Finding("memory.wired", "ok", "the limit of wired memory is the system's own")
        return
    yield Finding(
        "memory.wired",
        "warn",
        f"iogpu.wired_limit_mb is {limit}: with a raised limit, requests at once have made "
        "machines panic (mlx 3186)",
        "sudo sysctl iogpu.wired_limit_mb=0 gives the choice back to the system",
    )


def settings(subject: Subject) -> Iterator[Finding]:
    given = sorted(name for name in subject.environ if name.startswith(PREFIX))
    try:
        _ = subject.settings
    except BadRequest as error:
        yield Finding("settings.values", "fail", error.message, "correct or unset the variable")
    removed = removed_variables(subject.environ)
    for name in given:
        if name in removed:
            what = f"{name} has no effect any more: {removed[name]}"
            yield Finding("settings.names", "warn", what, "unset it")
        elif name not in VARIABLES:
            near = difflib.get_close_matches(name, VARIABLES, 1)
            remedy = f"unset it, or set {near[0]}" if near else "unset it"
            yield Finding("settings.names", "warn", f"nobody reads {name}", remedy)
    known = [name for name in given if name in VARIABLES and not name.endswith("_KEY")]
    summary = (
        ", ".join(f"{name}={subject.environ[name]}" for name in known) or "all at their defaults"
    )
    yield Finding("settings.given", "ok", summary)


def runtime_folder(subject: Subject) -> Iterator[Finding]:
    """The folder where engine and clients meet."""
    folder = subject.runtime.folder
    try:
        there = inspect(subject.runtime)
    except EngineUnavailable as error:
        what, _, remedy = error.message.rpartition(": ")
        yield Finding("runtime.folder", "fail", what, remedy)
        return
    summary = f"{folder} is this user's alone" if there else f"{folder} will be made"
    yield Finding("runtime.folder", "ok", summary)


def disk_tier(subject: Subject) -> Iterator[Finding]:
    chosen, wanted = subject.settings.disk_cache, subject.settings.disk_cache_bytes
    if chosen is None or wanted == 0:
        summary = "the prefix cache is not kept on disk"
        yield Finding("disk.prefix_cache", "note", summary)
        return
    place = _nearest(chosen)
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        remedy = f"make it a folder of yours, or set {PREFIX}DISK_CACHE to another"
        yield Finding("disk.prefix_cache", "fail", f"{chosen} cannot be written to", remedy)
        return
    free, kept, most = shutil.disk_usage(place).free, held(chosen), disk_limit(chosen, wanted)
    summary = f"{chosen}: prefixes take {size(kept)} of {size(most)}, {size(free)} are free"
    if free < most - kept:
        remedy = f"free some, or lower {PREFIX}DISK_CACHE_BYTES"
        yield Finding("disk.prefix_cache", "warn", summary, remedy)
    else:
        yield Finding("disk.prefix_cache", "ok", summary)


def download(subject: Subject) -> Iterator[Finding]:
    if subject.outline is None:
        return
    needed, place = subject.outline.weight_bytes, _nearest(cache_root())
    free = shutil.disk_usage(place).free
    summary = f"{subject.model} takes {size(needed)} to download, {size(free)} are free"
    if free < needed:
        remedy = "free some, or set HF_HUB_CACHE to a larger disk"
        yield Finding("disk.download", "fail", summary, remedy)
    else:
        yield Finding("disk.download", "ok", summary)


def owners_file(subject: Subject) -> Iterator[Finding]:
    """The TOML file of options that the engine's owner grants."""
    file = subject.settings.models_file
    if file is None:
        return
    try:
        granted = read_grants(file)
    except BadRequest as error:
        remedy = "correct the file: a table of model_info.mlx options per model"
        yield Finding("settings.models_file", "fail", error.message, remedy)
        return
    strange = [each for name, own in granted.items() for each in _strange(subject, name, own)]
    for summary in strange:
        remedy = "name one that `mlx-provider plugins` lists, or install its plugin"
        yield Finding("settings.models_file", "fail", f"{file}: {summary}", remedy)
    if not strange:
        yield Finding("settings.models_file", "ok", f"{file}: {len(granted)} models")


def _strange(subject: Subject, model: str, options: ModelOptions) -> Iterator[str]:
    """Parsers and drafters that the owner names for a model, but no plugin has."""
    registry = subject.registry
    for named, find in (
        (options.tool_parser, registry.tool_parser),
        (options.reasoning_parser, registry.reasoning_parser),
        (None if options.drafter in UNNAMED else options.drafter, registry.drafter),
    ):
        try:
            if named:
                find(named)
        except BadRequest as error:
            yield f"{model}: {error.message}"


def _nearest(folder: Path) -> Path:
    path = folder.expanduser().absolute()
    return next(each for each in (path, *path.parents) if each.exists())
