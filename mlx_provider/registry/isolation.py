"""Where a stranger's code runs."""

from __future__ import annotations

from types import TracebackType


class Isolation:
    """Holds back whatever a plugin raises and keeps it as one line in `error`.

    `SystemExit` counts: a plugin that calls `sys.exit` must not end the gateway.
    `KeyboardInterrupt` is the user's and passes.
    """

    def __init__(self) -> None:
        self.error: str | None = None

    def __enter__(self) -> Isolation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception | SystemExit):
            return False
        self.error = " ".join(f"{type(error).__name__}: {error}".split())
        return True
