"""Checks of `mlx-provider doctor` for the machine: memory, folders, settings, plugins, this user's
engine, and the `config.yaml` of a LiteLLM proxy in the working folder."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ..client.connection import local_client
from ..client.runtime_folder import check_folder, differences, holder, identity, why_none_runs
from ..config import PREFIX
from ..engine.prefix_cache.files import bytes_on_disk, disk_limit
from ..errors import BadRequest, EngineUnavailable, OtherProtocol
from ..gateway.models import device_memory
from ..logs import format_size
from ..protocol.health import Health
from ..protocol.requests import OperatorOptions
from ..registry.discovery import SELECTION, did_you_mean
from ..safe_open import obstacle, read_bounded
from ..serving.drafting import UNNAMED
from ..serving.hub import cache_root
from ..serving.memory_limit import available_memory
from ..settings import SETTING_NAMES
from .subject import Finding, State, Subject

LEAST_BYTES = 4 * 10**9
"""Below this, few useful models fit. Also the size of a model if none is named."""
SPARE_BYTES = 10**9
"""A disk with less free space counts as almost full."""
LOG_BYTES = 10**7
"""For sockets and the log of an engine."""
OTHER_VARIABLES = (SELECTION, PREFIX + "RUNTIME_DIR", PREFIX + "API_KEY")
VARIABLES = frozenset([*(PREFIX + name.upper() for name in SETTING_NAMES), *OTHER_VARIABLES])
RESTART = "mlx-provider engine restart (with --idle: once no request runs)"
CONFIG, LARGEST_CONFIG = "config.yaml", 2**22
"""Its name, and its maximum size in bytes."""
HANDLER, OPTIONS_PATH = "mlx_provider.litellm.handler", "model_info.mlx"
NAME = b"mlx_provider"
"""A file without it is of another program."""
OPTIONS = frozenset(OperatorOptions.model_fields)
MAP = "custom_provider_map"
MAP_LINES = f"litellm_settings: {{{MAP}: [{{provider: mlx, custom_handler: {HANDLER}}}]}}"
UNREADABLE = (OSError, ValueError, LookupError, AttributeError, RecursionError, yaml.YAMLError)
"""Errors of reading and of `yaml.safe_load`; `!!bool odd` is a `KeyError`."""
Fields = Mapping[str, Any]


def check_memory(subject: Subject) -> Iterator[Finding]:
    limit, own = device_memory(subject.environ), subject.settings.memory_limit
    why = f"{PREFIX}MEMORY_LIMIT" if own else f"{format_size(available_memory())} are available now"
    summary = f"models and requests may take {format_size(limit)} ({why})"
    problem = f"{summary}: few useful models fit" if limit < LEAST_BYTES else ""
    remedy = f"close other programs, or raise {PREFIX}MEMORY_LIMIT"
    yield Finding.of("memory.limit", problem, summary, remedy, "warn")


def check_wired_memory(subject: Subject) -> Iterator[Finding]:
    if subject.is_mac:
        summary, limit = "the limit of wired memory is the system's own", subject.wired()
        remedy = "sudo sysctl iogpu.wired_limit_mb=0 gives the choice back to the system"
        danger = f"iogpu.wired_limit_mb is {limit}: with a raised limit, several requests at once "
        problem = f"{danger}have made machines panic (mlx issue 3186)" if limit else ""
        yield Finding.of("memory.wired", problem, summary, remedy, "warn")


def check_settings(subject: Subject) -> Iterator[Finding]:
    given = sorted(name for name in subject.environ if name.startswith(PREFIX))
    try:
        _ = subject.settings
    except BadRequest as error:
        yield Finding("settings.values", "fail", error.message, "correct or unset the variable")
    for name in given:
        if name not in VARIABLES:
            remedy = f"unset it; {did_you_mean(name, VARIABLES, 1)}".removesuffix("; ")
            yield Finding("settings.names", "warn", f"no setting is named {name}", remedy)
    known = [name for name in given if name in VARIABLES and not name.endswith("_KEY")]
    summary = ", ".join(f"{name}={subject.environ[name]}" for name in known)
    yield Finding("settings.given", "ok", summary or "all at their defaults")


def check_runtime_folder(subject: Subject) -> Iterator[Finding]:
    folder, problem, remedy = subject.runtime.folder, "", ""
    summary = f"{folder} will be made"
    try:
        if check_folder(subject.runtime):
            summary = f"{folder} is this user's alone"
        if (free := _free(folder)) < LOG_BYTES:
            size = format_size(free)
            problem = f"{folder}: only {size} are free for sockets and the engine's log"
            remedy = f"free some, or set {PREFIX}RUNTIME_DIR to a folder on another disk"
    except EngineUnavailable as error:  # `check_folder` ends its messages with a remedy
        problem, _, remedy = error.message.rpartition(": ")
    yield Finding.of("runtime.folder", problem, summary, remedy)


def check_disk_tier(subject: Subject) -> Iterator[Finding]:
    """Whether the part of the prefix cache that is on disk can be written, and has space."""
    name, folder = "disk.prefix_cache", subject.settings.disk_cache
    wanted = subject.settings.disk_cache_bytes
    if folder is None or wanted == 0:
        yield Finding(name, "note", "the prefix cache is not kept on disk")
    elif why := obstacle(folder, subject.home):
        what, _, remedy = why.rpartition(": ")
        remedy += f", or set {PREFIX}DISK_CACHE to another folder"
        yield Finding(name, "fail", f"no prefixes are kept in {folder}: {what}", remedy)
    else:
        free, used, most = _free(folder), bytes_on_disk(folder), disk_limit(folder, wanted)
        sizes = f"prefixes take {format_size(used)} of {format_size(most)}"
        summary = f"{folder}: {sizes}, {format_size(free)} are free"
        remedy = f"free some, or lower {PREFIX}DISK_CACHE_BYTES (0: no cache on disk)"
        problem = summary if free < max(most - used, SPARE_BYTES) else ""
        yield Finding.of(name, problem, summary, remedy, "warn")


def check_download(subject: Subject) -> Iterator[Finding]:
    """Whether a download has space: of the model, if it is not here, or of some useful model."""
    if subject.folder is not None:
        return
    root, remedy = cache_root(), "free some, or set HF_HUB_CACHE to a folder on a larger disk"
    if why := obstacle(root, subject.home):
        summary = f"no model can be downloaded to {root}: {why.rpartition(': ')[0]}"
        yield Finding("disk.models", "warn", summary, remedy)
        return
    needed = LEAST_BYTES if subject.model is None else subject.checkpoint.weight_bytes
    free, model = _free(root), subject.model or "a useful model"
    summary = f"{root}: {format_size(free)} are free, {model} takes {format_size(needed)}"
    problem = summary if free < needed else ""
    state: State = "fail" if subject.model else "warn"
    yield Finding.of("disk.models", problem, summary, remedy, state)


def check_plugins(subject: Subject) -> Iterator[Finding]:
    working = []
    for plugin in subject.registry.plugins:
        if plugin.error is None:
            working.append(plugin.name)
        else:
            package = plugin.distribution
            remedy = f"pip install --upgrade {package}, or pip uninstall {package}"
            remedy = remedy if package else f"take it out of {SELECTION}, or install it"
            summary = f"plugin {plugin.name} is off: {plugin.error}"
            yield Finding(f"plugins.{plugin.name}", "fail", summary, remedy)
        for note in plugin.notes:
            remedy = "see `mlx-provider plugins`; update the plugin or leave it out"
            yield Finding(f"plugins.{plugin.name}", "warn", f"{plugin.name}: {note}", remedy)
    remedy = f"unset {SELECTION}, or install mlx-provider anew"
    problem = "" if working else "no plugin works: nothing is served"
    yield Finding.of("plugins.working", problem, ", ".join(working), remedy)


def check_engine(subject: Subject) -> Iterator[Finding]:
    here, client, why_none = subject.runtime, local_client(subject.environ), None
    try:
        if why_none := why_none_runs(here):
            yield Finding("engine.running", "ok", why_none)
        else:
            yield from check_health(client.health(), subject)
    except OtherProtocol as error:
        yield Finding("engine.out_of_date", "warn", error.message, RESTART)
    except EngineUnavailable as error:
        if why_none is None:  # raised by `why_none_runs`, which ends its messages with a remedy
            what, _, remedy = error.message.rpartition(": ")
            yield Finding("engine.running", "fail", what, remedy)
            return
        pid = holder(here.lock)
        what = f"engine process {pid} does not answer ({error.message})"
        remedy = f"see {here.log}, end process {pid}, or wait if it is starting"
        yield Finding("engine.running", "warn", what, remedy)
    finally:
        client.close()


def check_health(health: Health, subject: Subject) -> Iterator[Finding]:
    if not health.ok:
        remedy = f"{RESTART}; its log is {subject.runtime.log}"
        yield Finding("engine.running", "fail", f"the engine has died: {health.detail}", remedy)
        return
    models = ", ".join(model.model for model in health.models) or "no model"
    summary = f"process {health.pid}, mlx-provider {health.version} on {health.device}: {models}, "
    yield Finding("engine.running", "ok", summary + format_size(health.active_memory))
    if changed := differences(health.identity, identity(subject.environ)):
        texts = "; ".join(changed.values())
        summary = f"the engine was started with other settings or plugins: {texts}"
        yield Finding("engine.settings", "warn", summary, RESTART)


def check_config_file(subject: Subject) -> Iterator[Finding]:
    """Finds nothing if there is no file, or if it does not concern this package."""
    path, data = subject.working_folder / CONFIG, b""
    try:
        data = read_bounded(path, LARGEST_CONFIG)
        content = _fields(yaml.safe_load(data.decode()))
    except FileNotFoundError:
        return
    except UNREADABLE as error:
        if data and NAME not in data:  # of another program, perhaps with tags of its own
            return
        state: State = "fail" if data else "warn"
        summary = f"{path} cannot be read: {' '.join(str(error).split())[:300]}"
        yield Finding("config.file", state, summary, "correct the file")
        return
    entries = [entry for entry in _list(content.get("model_list")) if _model(entry)]
    if not entries and NAME not in data:
        return
    problems = list(_check_handler(content))
    for entry in entries:
        name = f"{CONFIG}, {entry.get('model_name')!r}"
        checks = (_check_places(entry), _check_options(entry, subject), _check_folder(entry, path))
        for what, remedy in chain.from_iterable(checks):
            problems.append(Finding("config.entries", "fail", f"{name}: {what}", remedy))
    summary = f"{path}: it names {len(entries)} model(s) of this package"
    yield from problems or [Finding("config.file", "ok", summary)]


def _free(folder: Path) -> int:
    """Free bytes on the disk of a folder, which need not exist yet."""
    path = folder.expanduser().absolute()
    nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    return shutil.disk_usage(nearest).free


def _check_handler(content: Fields) -> Iterator[Finding]:
    listed = _list(_fields(content.get("litellm_settings")).get(MAP))
    handlers = {str(entry.get("provider")): str(entry.get("custom_handler")) for entry in listed}
    found = handlers.get("mlx")
    if found is None:
        summary = f"{CONFIG}: litellm_settings.{MAP} names no handler of the provider `mlx`"
        yield Finding("config.handler", "fail", summary, f"write {MAP_LINES}")
    # a quite different name may be a handler of the user's own
    elif found != HANDLER and ("mlx_provider" in found or did_you_mean(found, [HANDLER])):
        summary = f"{CONFIG}: there is no handler {found!r}"
        yield Finding("config.handler", "fail", summary, f"did you mean {HANDLER!r}?")


def _check_places(entry: Fields) -> Iterator[tuple[str, str]]:
    for part in ("litellm_params", "model_info"):
        for name in _fields(entry.get(part)).keys() & OPTIONS:
            yield f"{part}.{name} has no effect", f"write it as {OPTIONS_PATH}.{name}"
    if "mlx" in _fields(entry.get("litellm_params")):
        yield "litellm_params.mlx has no effect", f"write it as {OPTIONS_PATH}"


def _check_options(entry: Fields, subject: Subject) -> Iterator[tuple[str, str]]:
    info = _fields(entry.get("model_info"))
    nested = {} if info.get("mlx") is None else info["mlx"]
    if not isinstance(nested, Mapping):
        yield f"{OPTIONS_PATH} is not a mapping", f"write {OPTIONS_PATH}: {{kv_bits: 8}}"
        return
    # `model_info.mlx_kv_bits` is the same as `model_info.mlx.kv_bits`
    flat = {str(n).removeprefix("mlx_"): v for n, v in info.items() if str(n).startswith("mlx_")}
    given = flat | {str(name): value for name, value in nested.items()}
    places = {name: f"{OPTIONS_PATH}_{name}" for name in flat}
    places |= {str(name): f"{OPTIONS_PATH}.{name}" for name in nested}
    for name in given.keys() - OPTIONS:
        remedy = did_you_mean(name, OPTIONS, 1) or f"there are {', '.join(sorted(OPTIONS))}"
        yield f"{places[name]} is no option", remedy
    known = {name: given[name] for name in given if name in OPTIONS}
    try:
        options = OperatorOptions.model_validate(known)
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            name, *inside = map(str, fault["loc"])
            place = ".".join([places[name], *inside])
            yield f"{place}: {fault['msg']}", "correct it"
        return
    registry = subject.registry
    for value, find in (  # raises if no plugin has it
        (options.tool_parser, registry.tool_parser),
        (options.reasoning_parser, registry.reasoning_parser),
        (None if options.drafter in UNNAMED else options.drafter, registry.drafter),
    ):
        try:
            if value:
                find(value)
        except BadRequest as error:
            yield error.message, "name one that `mlx-provider plugins` lists"


def _check_folder(entry: Fields, config: Path) -> Iterator[tuple[str, str]]:
    """Problems of a model's folder: it does not exist, or depends on where an engine starts."""
    name = _model(entry)
    if _fields(entry.get("litellm_params")).get("api_base") or not name.startswith(("/", ".", "~")):
        return
    path, exists = Path(name), False
    with suppress(RuntimeError, OSError):  # no such user; a name that is too long, a locked folder
        path = path.expanduser()
        exists = (config.parent / path).is_dir()
    if not exists:
        yield f"no folder {name}", "write the full path of a model's folder"
    elif not path.is_absolute():
        summary = f"{name} depends on the folder in which an engine was started"
        yield summary, f"write model: mlx/{(config.parent / path).resolve()}"


def _model(entry: Fields) -> str:
    model = str(_fields(entry.get("litellm_params")).get("model"))
    return model.removeprefix("mlx/") if model.startswith("mlx/") else ""  # another provider's


def _fields(value: object) -> Fields:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Fields]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
