"""Tries a client's grammar in a separate process before the engine compiles it.

llguidance 1.9.1 limits most of its work, but not all: a chain of references overflows the stack,
`multipleOf` and intersections may never end (derivre 0.3.13, relevance.rs), and threads cannot be
stopped. The engine compiles only grammars that the small process survives within its limits.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ...bounded_process import BoundedProcesses, ProcessEnded
from ...errors import BadRequest, RequestFailed

MAX_GRAMMAR = 1_000_000
"""Most characters of one grammar, including its schemas."""
SECONDS = 1.0
"""Processor time for one grammar. Usual schemas take a few milliseconds."""
REQUEST_SECONDS = 4.0
"""Processor time for all grammars of a request. Every tool is one."""
LIMITS: Mapping[str, int | bool] = MappingProxyType(
    {"max_lexer_states": 100_000, "verbose_errors": False}
)
"""Limits other than the defaults of `llguidance.LLParserLimits`: each row keeps about 2 kB per
state, and errors are sent to clients."""
MEMORY = 1 << 30
"""Memory limit of the small process in bytes."""
CHILD = Path(__file__).with_name("trial_process.py")

_ENDS: Mapping[int, str] = MappingProxyType(
    {
        signal.SIGPROF: f"it takes more than {SECONDS:g} s to compile, or too long for each token",
        signal.SIGSEGV: "it is nested too deep, or refers too far",
        signal.SIGBUS: "it is nested too deep, or refers too far",
    }
)


@dataclass
class Allowance:
    """Processor time that the grammars of a request may still use."""

    seconds: float = REQUEST_SECONDS
    namespace: str = ""
    """That of the request. Compiled grammars are not shared with others."""

    def spend(self, seconds: float) -> None:
        self.seconds -= seconds
        if self.seconds <= 0:
            raise BadRequest(
                f"the grammars of this request take more than {REQUEST_SECONDS:g} s to compile; "
                "send fewer or plainer tools or schemas"
            )


class GrammarTrial:
    """Tries grammars over one vocabulary. Safe from any thread.

    size: tokens of the vocabulary. names: ids of its special tokens. The process starts with the
    first grammar and ends with this object.
    """

    def __init__(self, size: int, names: Mapping[str, int]) -> None:
        vocabulary = json.dumps({"size": size, "names": dict(names)}).encode()
        self._setups = {"vocabulary": vocabulary}
        self._processes = BoundedProcesses(CHILD, MEMORY, [json.dumps(dict(LIMITS))])

    def wrong(self, lark: str, allowance: Allowance) -> str:
        """The error in a grammar, or an empty text. Raises the errors of
        `Allowance.spend`."""
        if len(lark) > MAX_GRAMMAR:
            return f"it is longer than {MAX_GRAMMAR} characters"
        message = json.dumps({"lark": lark, "seconds": SECONDS}).encode()
        try:
            found = json.loads(self._processes.ask(message, self._setups))
        except ProcessEnded as ended:
            reason = _reason(ended)
            allowance.spend(SECONDS)
            return reason
        except OSError as error:
            failed = f"the process that tries grammars does not start: {error}"
            raise RequestFailed(failed) from None
        allowance.spend(found["seconds"])
        return str(found["wrong"])


def _reason(ended: ProcessEnded) -> str:
    """Why a process has ended, as the problem of the grammar. Raises `RequestFailed`."""
    reason = _ENDS.get(-ended.code) or ended.reason
    if not reason:
        raise RequestFailed(f"the trial of a grammar {ended}") from None
    return reason
