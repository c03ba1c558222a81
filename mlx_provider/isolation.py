"""Catches any error at four boundaries, and says whose code failed: a request's work on the host
(`Engine.isolate`), work that its caller can do without, such as a trial (`attempt`), a call of a
plugin (`plugin_call`), and work in a thread (`background` if nobody waits for it, else `resolve`).
What keeps failing is disabled for a while (`CircuitBreaker`)."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, TypeVar, cast

from .errors import MLXProviderError, PluginError, RequestFailed
from .logs import Trace

T = TypeVar("T")
Use = TypeVar("Use", bound=Callable[..., Any])
log = logging.getLogger(__name__)
CORE = __name__.partition(".")[0]
"""Our package, and the group of plugins' entry points."""
MACHINE_ERRORS = (OSError, MemoryError)
NO_MEMORY = ("[malloc", "out of memory", "insufficient memory")
DEVICE_ERRORS = ("[metal", "[cuda", *NO_MEMORY)
"""Parts of MLX's messages about the device."""
MEMORY_HINT = "; if this repeats, set a lower MLX_PROVIDER_MEMORY_LIMIT"
LOG_HINT = "its traceback is in the engine's log (`mlx-provider engine logs`)"


@dataclass(frozen=True)
class FaultOrigin:
    """A plugin, and the line of its code that raised, or called what raised."""

    plugin: str
    """Its name, and its distribution in brackets."""
    built_in: bool
    called: str
    """Its function that was called: a hook, or a function of a record or a loaded model."""
    where: str
    """File, line and function of this code."""
    innermost: bool
    """Whether the error was raised without a call from this code into the core."""

    @classmethod
    def of(cls, error: BaseException) -> FaultOrigin | None:
        """From an error's frames; prefers third parties. `None`: no plugin's code took part."""
        frames = [frame for frame in _frames(error) if not _is_in(frame[0], "pluggy")]
        if all(_is_in(module, CORE) for module, *_ in frames):
            return None
        roots = [(_root(point.module), point) for point in entry_points(group=CORE)]
        # the plugin that each frame belongs to, if any
        owners = [next((p for root, p in roots if _is_in(m, root)), None) for m, *_ in frames]
        involved = [point for point in owners if point is not None]
        if not involved:
            return None
        point = ([point for point in involved if not _is_built_in(point)] or involved)[-1]
        places = [place for place, owner in enumerate(owners) if owner is point]
        first, last = frames[places[0]][1], places[-1]
        module, frame, line = frames[last]
        path = Path(frame.f_code.co_filename)
        depth = module.count(".") + (path.name == "__init__.py")
        file = "/".join(path.parts[-1 - depth :])
        dist = "" if point.dist is None else f"{point.dist.name} {point.dist.version}"
        where = f"{file}, line {line}, in {_name(frame)}"
        innermost = not any(_is_in(module, CORE) for module, *_ in frames[last + 1 :])
        return cls(f"{point.name} ({dist})", _is_built_in(point), _name(first), where, innermost)


def is_machine_error(error: BaseException) -> bool:
    """Whether files, network, memory or device are the cause, so that a retry can succeed."""
    text = _message(error).lower()
    return isinstance(error, MACHINE_ERRORS) or any(words in text for words in DEVICE_ERRORS)


def _message(error: BaseException) -> str:
    with suppress(Exception):  # its `__str__` may be code of a plugin
        return str(error)
    return "<its message cannot be read>"


def _frames(error: BaseException) -> list[tuple[str, FrameType, int]]:
    """Modules, frames and lines outside Python's own library, the innermost last."""
    walk = traceback.walk_tb(error.__traceback__)
    found = [(str(frame.f_globals.get("__name__", "")), frame, line) for frame, line in walk]
    own = {*sys.stdlib_module_names, ""}
    return [f for f in found if f[0].partition(".")[0] not in own and f[0] != __name__]


def _name(frame: FrameType) -> str:
    return frame.f_code.co_qualname.replace("<locals>.", "")


def _root(module: str) -> str:
    """The outermost package with a file. One without, a namespace, is shared by distributions."""
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(1, len(parts)))
    return next((n for n in names if getattr(sys.modules.get(n), "__file__", None)), module)


def _is_built_in(point: EntryPoint) -> bool:
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
        """Describe an error, and drop its frames."""
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
        for cause in _chain(error):
            cause.__traceback__ = None
        return cls(error, summary, trace, origin)

    @property
    def deliberate(self) -> bool:
        """Whether the error is one of `mlx_provider.errors`, raised on purpose."""
        return isinstance(self.error, MLXProviderError)

    @property
    def lasting(self) -> bool:
        """Whether a retry would fail, too: it is not deliberate, nor is the machine the cause."""
        return not (self.deliberate or is_machine_error(self.error))

    def of_request(self, part: str) -> MLXProviderError:
        """The error for a client if this fault ended a part of its request."""
        if isinstance(self.error, MLXProviderError):
            return self.error
        full = any(words in self.summary.lower() for words in NO_MEMORY)
        remedy = MEMORY_HINT if full else ""
        return self.of_plugin() or RequestFailed(f"{part} failed: {self.summary}{remedy}")

    def log(self, part: str) -> None:
        """Log that `part` failed; the traceback only if the error is not deliberate."""
        if self.deliberate:
            log.info("%s failed: %s", part, self.summary)
        else:
            log.error("%s failed\n%s", part, self.trace)

    def of_plugin(self) -> PluginError | None:
        """The error for a client if a plugin is the cause and the same request would fail again.
        `None`: it is not the cause, or a built-in plugin had called the core, which failed."""
        found = self.origin
        if found is None or not self.lasting or (found.built_in and not found.innermost):
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
    Rust (tokenizers, llguidance) is no `Exception`. Ctrl-C passes: the main thread gets it."""

    def __init__(
        self, failed: Callable[[Fault], None] | None = None, *passes: type[BaseException]
    ) -> None:
        """`failed` is called with the fault. Errors of the classes `passes` are not caught."""
        self.fault: Fault | None = None
        self._failed = failed
        self._passes = passes

    def __enter__(self) -> Isolation:
        return self

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> bool:
        ctrl_c = isinstance(error, KeyboardInterrupt) and current_thread() is main_thread()
        if error is None or ctrl_c or isinstance(error, self._passes):
            return False
        self.fault = Fault.of(error)
        if self._failed is not None:
            self._failed(self.fault)
        return True


def attempt(work: Callable[[], T]) -> T | Fault:
    """Return the result of `work`, or its fault. For work that the caller can do without."""
    with Isolation() as tried:
        return work()
    return cast("Fault", tried.fault)


def attempt_generator(
    work: Callable[[], Generator[Any, Any, object]], *passes: type[BaseException]
) -> Generator[Any, Any, Fault | None]:
    """`attempt` for a generator: returns its fault, or `None`. `passes`: as of `Isolation`."""
    with Isolation(None, GeneratorExit, *passes) as tried:
        yield from work()
    return tried.fault


def plugin_call(work: Callable[[], T], make_error: Callable[[Fault], MLXProviderError]) -> T:
    """Return the result of `work`. If it fails, raise what `make_error` makes of the fault."""
    found = attempt(work)
    if isinstance(found, Fault):
        raise make_error(found)
    return found


def background(part: str) -> Isolation:
    """For a `with` block that nobody waits for. Its fault is only logged."""
    return Isolation(lambda fault: fault.log(part))


def isolate_use(
    part: str, otherwise: Callable[[Any], object] = lambda user: None
) -> Callable[[Use], Use]:
    """Decorator: `background` for methods whose first argument has a `request`, which goes on
    without `part` after a fault. The method then returns `otherwise` of this argument."""

    def wrap(use: Use) -> Use:
        @wraps(use)
        def run(owner: Any, user: Any, *args: Any, **more: Any) -> Any:
            with background(f"request {user.request.id}: {part}"):
                return use(owner, user, *args, **more)
            return otherwise(user)

        return cast("Use", run)

    return wrap


def resolve(future: Future[T], work: Callable[[], T]) -> None:
    """Run `work`, for which another thread waits: `future` gets its result, or its error."""
    with Isolation(lambda fault: future.set_exception(fault.error)):
        future.set_result(work())


# ---- features that keep failing

TOLERATED = 1
"""Failures after which the feature is still used."""
FIRST_WAIT = 256
"""Steps without failure after which the feature is tried again, or its failures are forgotten."""
LONGEST_WAIT = 2**16
"""About twenty minutes at fifty steps per second."""


class CircuitBreaker:
    """Disables a feature that keeps failing, and tries it again after waits that grow."""

    def __init__(self, disabled: str = "", enabled: str = "") -> None:
        """Texts for the log, if any: `disabled` has a place for the number of failures."""
        self._disabled, self._enabled = disabled, enabled
        self.closed = True  # as of a circuit: the feature is in use
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
        """Count a step without failure; `used`: with the feature, not its fallback. Returns whether
        this step enables the feature again. One failure then disables it for twice as many steps,
        unless it has succeeded in so many before: then failures and waits count anew."""
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
