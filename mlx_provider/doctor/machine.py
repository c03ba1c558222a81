"""Memory of the machine, its folders, and the settings of the environment."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..client.connection import TRANSPORT
from ..client.runtime_folder import inspect
from ..config import PREFIX, SETTINGS, EngineSettings, removed_variables
from ..engine.memory import memory_limit, pool_limit
from ..engine.prefix_cache.disk import bytes_on_disk, disk_limit
from ..errors import BadRequest, EngineUnavailable
from ..gateway.models import size
from ..protocol.requests import ModelOptions
from ..registry.discovery import SELECTION
from ..safe_open import obstacle
from ..serving.drafting import UNNAMED
from ..serving.grants import read_grants
from ..serving.hub import cache_root
from .findings import Finding, State
from .subject import Subject

LEAST_BYTES = 4 * 10**9
"""For any useful model."""
SPARE_BYTES, LOG_BYTES = 10**9, 10**7
"""Free disk space that counts as almost full, and that an engine needs."""
OTHER_VARIABLES = (SELECTION, TRANSPORT, PREFIX + "RUNTIME_DIR", PREFIX + "API_KEY")
VARIABLES = frozenset([*(PREFIX + name.upper() for name in SETTINGS), *OTHER_VARIABLES])


def room(settings: EngineSettings) -> int:
    """Bytes for weights and rows: the limit without MLX's pool of free buffers."""
    limit = memory_limit(settings.memory_limit)
    return limit - pool_limit(limit)


def memory(subject: Subject) -> Iterator[Finding]:
    limit = memory_limit(subject.settings.memory_limit)
    pool = pool_limit(limit)
    summary = f"{size(limit)} for models and requests, {size(pool)} of it for free buffers"
    if limit < LEAST_BYTES:
        remedy = f"close other programs, or raise {PREFIX}MEMORY_LIMIT"
        yield Finding("memory.limit", "warn", f"{summary}: few models of use fit", remedy)
    else:
        yield Finding("memory.limit", "ok", summary)


def wired(subject: Subject) -> Iterator[Finding]:
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
    folder = subject.runtime.folder
    try:
        there = inspect(subject.runtime)
    except EngineUnavailable as error:
        what, _, remedy = error.message.rpartition(": ")
        yield Finding("runtime.folder", "fail", what, remedy)
        return
    free = _free(folder)
    if free < LOG_BYTES:
        summary = f"{folder}: only {size(free)} are free for sockets and the engine's log"
        remedy = f"free some, or set {PREFIX}RUNTIME_DIR to a folder on another disk"
        yield Finding("runtime.folder", "fail", summary, remedy)
    else:
        summary = f"{folder} is this user's alone" if there else f"{folder} will be made"
        yield Finding("runtime.folder", "ok", summary)


def disk_tier(subject: Subject) -> Iterator[Finding]:
    """The folder of the prefix cache on disk can be written and has space."""
    chosen, wanted = subject.settings.disk_cache, subject.settings.disk_cache_bytes
    if chosen is None or wanted == 0:
        summary = "the prefix cache is not kept on disk"
        yield Finding("disk.prefix_cache", "note", summary)
        return
    if why := obstacle(chosen, subject.home):
        what, _, remedy = why.rpartition(": ")
        summary = f"no prefixes are kept in {chosen}: {what}"
        remedy = f"{remedy}, or set {PREFIX}DISK_CACHE to another folder"
        yield Finding("disk.prefix_cache", "fail", summary, remedy)
        return
    free, used, most = _free(chosen), bytes_on_disk(chosen), disk_limit(chosen, wanted)
    summary = f"{chosen}: prefixes take {size(used)} of {size(most)}, {size(free)} are free"
    if free < max(most - used, SPARE_BYTES):
        remedy = f"free some, or lower {PREFIX}DISK_CACHE_BYTES (0: no cache on disk)"
        yield Finding("disk.prefix_cache", "warn", summary, remedy)
    else:
        yield Finding("disk.prefix_cache", "ok", summary)


def download(subject: Subject) -> Iterator[Finding]:
    """The Hub cache can be written and has space for the model, or for any."""
    if subject.folder is not None:
        return
    root, remedy = cache_root(), "free some, or set HF_HUB_CACHE to a folder on a larger disk"
    if why := obstacle(root, subject.home):
        what, _, remedy = why.rpartition(": ")
        yield Finding(
            "disk.models", "warn", f"no model can be downloaded to {root}: {what}", remedy
        )
        return
    free = _free(root)
    summary = f"{root}: {size(free)} are free for models"
    if subject.outline is not None:
        needed = subject.outline.weight_bytes
        state: State = "fail" if free < needed else "ok"
        summary += f", {subject.model} takes {size(needed)}"
    else:
        state = "warn" if free < LEAST_BYTES else "ok"
    yield Finding("disk.models", state, summary, "" if state == "ok" else remedy)


def owners_file(subject: Subject) -> Iterator[Finding]:
    """Options that the engine's owner grants (TOML)."""
    file = subject.settings.models_file
    if file is None:
        return
    try:
        granted = read_grants(file)
    except BadRequest as error:
        remedy = "correct the file: a table of model_info.mlx options per model"
        yield Finding("settings.models_file", "fail", error.message, remedy)
        return
    strange = [each for name, own in granted.items() for each in strange_names(subject, name, own)]
    for summary in strange:
        remedy = "name one that `mlx-provider plugins` lists, or install its plugin"
        yield Finding("settings.models_file", "fail", f"{file}: {summary}", remedy)
    if not strange:
        yield Finding("settings.models_file", "ok", f"{file}: {len(granted)} models")


def plugins(subject: Subject) -> Iterator[Finding]:
    known = subject.registry.plugins
    for plugin in known:
        if plugin.error is not None:
            summary = f"plugin {plugin.name} is off: {plugin.error}"
            yield Finding(f"plugins.{plugin.name}", "fail", summary, _remedy(plugin.distribution))
        for note in plugin.notes:
            remedy = "see `mlx-provider plugins`; update the plugin or leave it out"
            yield Finding(f"plugins.{plugin.name}", "warn", f"{plugin.name}: {note}", remedy)
    working = ", ".join(plugin.name for plugin in known if plugin.error is None)
    if working:
        yield Finding("plugins.working", "ok", working)
    else:
        remedy = "unset MLX_PROVIDER_PLUGINS, or install mlx-provider anew"
        yield Finding("plugins.working", "fail", "no plugin works: nothing is served", remedy)


def _remedy(distribution: str) -> str:
    if not distribution:
        return "take it out of MLX_PROVIDER_PLUGINS, or install it"
    return f"pip install --upgrade {distribution}, or pip uninstall {distribution}"


def strange_names(subject: Subject, model: str, options: ModelOptions) -> Iterator[str]:
    """Parsers and drafters that the owner names, but no plugin has."""
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


def _free(folder: Path) -> int:
    path = folder.expanduser().absolute()
    nearest = next(each for each in (path, *path.parents) if each.exists())
    return shutil.disk_usage(nearest).free
