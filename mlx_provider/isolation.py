"""The one boundary around the work of one request, or of one plugin."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType

from .errors import MLXProviderError, RequestFailed


class Isolation:
    """Holds back whatever its block raises, of any class, and keeps it in `error`.

    `Exception` would not do: a stranger's code may call `sys.exit`, and a panic of a library
    written in Rust (tokenizers, llguidance) is no `Exception`. Ctrl-C passes, which reaches the
    main thread alone. For blocks of synchronous code.
    """

    def __init__(
        self,
        failed: Callable[[BaseException], None] | None = None,
        *,
        generator: bool = False,
    ) -> None:
        """`failed` is told of the error, too. `generator`: the block yields, and may be closed."""
        self.error: BaseException | None = None
        self._passes = (GeneratorExit,) if generator else ()
        self._failed = failed

    def __enter__(self) -> Isolation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is None or _is_ctrl_c(error) or isinstance(error, self._passes):
            return False
        self.error = error
        if self._failed is not None:
            self._failed(error)
        return True


def told(error: BaseException) -> str:
    """An error in one line: its class, its message, and the line of code it came from."""
    if isinstance(error, MLXProviderError):
        return f"{type(error).__name__}: {error.message}"
    return " ".join(f"{type(error).__name__}: {error}{_place(error)}".split())


def error_of_request(part: str, error: BaseException) -> MLXProviderError:
    """What a client is told when a part of its request's work raised `error`."""
    if isinstance(error, MLXProviderError):
        return error
    return RequestFailed(f"{part} failed: {told(error)}")


def _place(error: BaseException) -> str:
    """Where a stranger's code is to be mended: the innermost line outside Python's own library."""
    place, traceback = "", error.__traceback__
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in sys.stdlib_module_names and module != __name__:
            place = f" ({module}, line {traceback.tb_lineno})"
        traceback = traceback.tb_next
    return place


def _is_ctrl_c(error: BaseException) -> bool:
    main = threading.current_thread() is threading.main_thread()
    return isinstance(error, KeyboardInterrupt) and main
