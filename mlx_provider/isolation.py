"""The boundary for errors in the work of one request, or of one plugin."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .errors import MLXProviderError, PluginError, RequestFailed
from .fault_origin import FaultOrigin, fault_origin, of_the_machine
from .log_lines import Trace

LOG = "its traceback is in the engine's log (`mlx-provider engine logs`)"


@dataclass(frozen=True)
class Fault:
    error: BaseException
    """Without its frames, which would keep caches and weights alive."""
    summary: str
    """Class, message, and line of code, in one line."""
    trace: Trace
    origin: FaultOrigin | None = None

    @property
    def ours(self) -> bool:
        """Whether the error is one of `mlx_provider.errors`, raised on purpose."""
        return isinstance(self.error, MLXProviderError)

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
        return PluginError(f"{found}: {found.called} failed: {self.summary}; {LOG}")

    @property
    def lasting(self) -> bool:
        """Whether it is neither raised on purpose nor caused by the machine."""
        return not (self.ours or of_the_machine(self.error))


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
        if error is None or _is_ctrl_c(error) or isinstance(error, self._passes):
            return False
        self.fault = _fault(error)
        if self._failed is not None:
            self._failed(self.fault)
        return True


def _fault(error: BaseException) -> Fault:
    origin = None
    if isinstance(error, MLXProviderError):
        told = f"{type(error).__name__}: {error.message}"
    else:
        origin = fault_origin(error)
        place = f" ({origin.where})" if origin else _place(error)
        if isinstance(error, SyntaxError) and error.filename:  # has a position that is in no frame
            place = ""
        told = " ".join(f"{type(error).__name__}: {error}{place}".split())
    fault = Fault(error, told, Trace("".join(traceback.format_exception(error))), origin)
    for each in _chain(error):
        each.__traceback__ = None
    return fault


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        each = todo.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            todo += [each.__cause__, each.__context__]
            yield each


def _place(error: BaseException) -> str:
    """The innermost line outside Python's own library."""
    place, frame = "", error.__traceback__
    while frame is not None:
        module = frame.tb_frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in sys.stdlib_module_names and module != __name__:
            place = f" ({module}, line {frame.tb_lineno})"
        frame = frame.tb_next
    return place


def _is_ctrl_c(error: BaseException) -> bool:
    main = threading.current_thread() is threading.main_thread()
    return isinstance(error, KeyboardInterrupt) and main
