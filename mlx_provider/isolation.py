"""Catches any error of plugins and passes: `Isolation` of a request's own work, `attempt` of a pass
of the device, `plugin_call`, and `background` work. `Fault` describes it, `FaultOrigin` names the
plugin, `CircuitBreaker` disables what keeps failing, and `LogLines` logs one line per entry, with
any text from clients or third parties."""

from __future__ import annotations

import copy
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import FrameType
from typing import TypeVar, cast

from .errors import MLXProviderError, PluginError, RequestFailed

T = TypeVar("T")
log = logging.getLogger(__name__)
CORE = __name__.partition(".")[0]
"""Our package, and the group of plugins' entry points."""
MACHINE = (OSError, MemoryError)
DEVICE = ("[metal", "[malloc", "[cuda", "out of memory", "insufficient memory")
"""Parts of MLX's messages about the device."""
TOLERATED = 1
"""Failures after which the feature is still used."""
FIRST_WAIT = 256
"""Steps without failure after which the feature is tried again, or its failures are forgotten."""
LONGEST_WAIT = 2**16
"""About twenty minutes at fifty steps per second."""
LOG_HINT = "its traceback is in the engine's log (`mlx-provider engine logs`)"


class Trace(str):
    """In a log entry: its lines follow the entry, indented."""


class LogLines(logging.Formatter):
    """Escapes unprintable characters, so that no text can start a line or control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        entry = copy.copy(record)
        entry.exc_info = entry.exc_text = entry.stack_info = None
        given = record.args if isinstance(record.args, tuple) else ()
        traces = [each for each in given if isinstance(each, Trace)]
        if traces:
            entry.args = tuple("" if isinstance(each, Trace) else each for each in given)
        if record.exc_info:
            traces.append(Trace(self.formatException(record.exc_info)))
        lines = (line for trace in traces for line in trace.splitlines() if line.strip())
        first = printable(super().format(entry).rstrip("\n"))
        return "\n    ".join([first, *map(printable, lines)])


def printable(text: str) -> str:
    """Escapes control characters, line ends and half surrogates."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def log_to_stderr(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(LogLines("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


@dataclass(frozen=True)
class FaultOrigin:
    """A plugin, and the line of its code that raised, or called what raised."""

    plugin: str
    """Its name, and its distribution in brackets."""
    ours: bool
    called: str
    """Its function that was called: a hook, or a function of a record or a loaded model."""
    where: str
    innermost: bool
    """Whether this code has not called the core."""

    @classmethod
    def of(cls, error: BaseException) -> FaultOrigin | None:
        """Prefers a third party's plugin to a built-in one."""
        frames = [each for each in _frames(error) if not _is_in(each[0], "pluggy")]
        if all(_is_in(module, CORE) for module, *_ in frames):
            return None
        roots = [(_root(point.module), point) for point in entry_points(group=CORE)]
        owners = [next((p for root, p in roots if _is_in(m, root)), None) for m, *_ in frames]
        found = [point for point in owners if point is not None]
        if not found:
            return None
        point = ([point for point in found if not _is_ours(point)] or found)[-1]
        places = [place for place, owner in enumerate(owners) if owner is point]
        first, last = frames[places[0]][1], places[-1]
        module, frame, line = frames[last]
        path = Path(frame.f_code.co_filename)
        depth = module.count(".") + (path.name == "__init__.py")
        file = "/".join(path.parts[-1 - depth :])
        dist = "" if point.dist is None else f"{point.dist.name} {point.dist.version}"
        return cls(
            f"{point.name} ({dist})",
            _is_ours(point),
            _name(first),
            f"{file}, line {line}, in {_name(frame)}",
            innermost=not any(_is_in(module, CORE) for module, *_ in frames[last + 1 :]),
        )


def is_machine_error(error: BaseException) -> bool:
    """Whether files, network, memory or device are the cause, so that a retry can succeed."""
    text = _message(error).lower()
    return isinstance(error, MACHINE) or any(each in text for each in DEVICE)


def _message(error: BaseException) -> str:
    with suppress(Exception):
        return str(error)
    return "<its message cannot be read>"


def _frames(error: BaseException) -> list[tuple[str, FrameType, int]]:
    """Modules, frames and lines outside Python's own library, the innermost last."""
    found = [
        (str(frame.f_globals.get("__name__", "")), frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    own = {*sys.stdlib_module_names, ""}
    return [each for each in found if each[0].partition(".")[0] not in own and each[0] != __name__]


def _name(frame: FrameType) -> str:
    return frame.f_code.co_qualname.replace("<locals>.", "")


def _root(module: str) -> str:
    """The outermost package that is not shared with other distributions."""
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(1, len(parts)))
    return next((n for n in names if getattr(sys.modules.get(n), "__file__", None)), module)


def _is_ours(point: EntryPoint) -> bool:
    return point.dist is not None and point.dist.name.replace("-", "_") == CORE


def _is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@dataclass(frozen=True)
class Fault:
    error: BaseException
    """Without its frames, which would keep caches and weights alive."""
    summary: str
    """Class, message, and line of code, in one line."""
    trace: Trace
    origin: FaultOrigin | None = None

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        origin, trace = None, Trace("".join(traceback.format_exception(error)))
        if isinstance(error, MLXProviderError):
            summary = f"{type(error).__name__}: {error.message}"
        else:
            origin = FaultOrigin.of(error)
            own = [f"{module}, line {line}" for module, _, line in _frames(error)]
            place = origin.where if origin else next(reversed(own), "")
            if isinstance(error, SyntaxError) and error.filename:  # its position is in no frame
                place = ""
            text = f"{type(error).__name__}: {_message(error)}" + (f" ({place})" if place else "")
            summary = " ".join(text.split())
        for each in _chain(error):
            each.__traceback__ = None
        return cls(error, summary, trace, origin)

    @property
    def ours(self) -> bool:
        """Whether the error is one of `mlx_provider.errors`, raised on purpose."""
        return isinstance(self.error, MLXProviderError)

    @property
    def lasting(self) -> bool:
        """Whether it is neither raised on purpose nor caused by the machine."""
        return not (self.ours or is_machine_error(self.error))

    def of_request(self, part: str) -> MLXProviderError:
        """The error for a client if this fault ended a part of its request."""
        if isinstance(self.error, MLXProviderError):
            return self.error
        return self.of_plugin() or RequestFailed(f"{part} failed: {self.summary}")

    def of_plugin(self) -> PluginError | None:
        """The error of a plugin that the same request would cause again. `None`: the machine is the
        cause, or a built-in plugin called the core."""
        found = self.origin
        if found is None or not self.lasting or (found.ours and not found.innermost):
            return None
        failed = f"plugin {found.plugin}: {found.called} failed"
        return PluginError(f"{failed}: {self.summary}; {LOG_HINT}")


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        each = todo.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            todo += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]
            yield each


class Isolation:
    """Catches any exception of its block and stores it as `fault`. Only for synchronous code.

    `Exception` is not enough: third-party code can call `sys.exit`, and a panic of a library in
    Rust (tokenizers, llguidance) is no `Exception`. Ctrl-C passes, because only the main thread
    gets it."""

    def __init__(
        self, failed: Callable[[Fault], None] | None = None, *, generator: bool = False
    ) -> None:
        """`failed` also gets the fault. `generator`: the block yields, and can be closed."""
        self.fault: Fault | None = None
        self._failed = failed
        self._passes = (GeneratorExit,) if generator else ()

    def __enter__(self) -> Isolation:
        return self

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> bool:
        main = threading.current_thread() is threading.main_thread()
        ctrl_c = isinstance(error, KeyboardInterrupt) and main
        if error is None or ctrl_c or isinstance(error, self._passes):
            return False
        self.fault = Fault.of(error)
        if self._failed is not None:
            self._failed(self.fault)
        return True


def attempt(work: Callable[[], T]) -> T | Fault:
    """Return the result, or the fault. For work that the caller can do without: a pass of the
    device, or a trial."""
    with Isolation() as tried:
        return work()
    return cast("Fault", tried.fault)


def plugin_call(work: Callable[[], T], make_error: Callable[[Fault], MLXProviderError]) -> T:
    """Return the result. A fault is raised as an error of the caller."""
    found = attempt(work)
    if isinstance(found, Fault):
        raise make_error(found)
    return found


def background(part: str) -> Isolation:
    """For work that nobody waits for. Its fault is only logged."""
    return Isolation(lambda fault: log.error("%s failed\n%s", part, fault.trace))


class CircuitBreaker:
    """Disables a feature that keeps failing, and tries it again after growing waits."""

    def __init__(self, disabled: str = "", enabled: str = "") -> None:
        """Texts for the log, if any: `disabled` has a place for the number of failures."""
        self._disabled, self._enabled = disabled, enabled
        self.closed = True
        self.failures = 0
        self._successes = 0
        self._needed = FIRST_WAIT

    def record_failure(self) -> bool:
        """Count a failure of the feature or of its fallback. Returns whether this disables it."""
        self._successes = 0
        if not self.closed:
            return False
        self.failures += 1
        self.closed = self.failures <= TOLERATED
        if self._disabled and not self.closed:
            log.error(self._disabled, self.failures)
        return not self.closed

    def record_success(self, *, used: bool) -> bool:
        """Count a step without failure. Returns whether the feature is enabled again. `used`: the
        step used the feature. The first failure of a trial ends it and doubles the next wait,
        unless as many steps succeeded before."""
        if self.closed and not used:
            return False
        self._successes += 1
        if self._successes < self._needed:
            return False
        self._successes = 0
        if self.closed:
            self.failures, self._needed = 0, FIRST_WAIT
            return False
        self.closed, self.failures = True, TOLERATED
        self._needed = min(2 * self._needed, LONGEST_WAIT)
        if self._enabled:
            log.info(self._enabled)
        return True
