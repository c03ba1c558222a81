"""A client's grammar is tried in a process of its own before it is compiled here.

llguidance 1.9.1 bounds most of its work, but not all: a chain of references overflows the stack,
`multipleOf` and intersections may be computed without end (derivre 0.3.13, relevance.rs), and no
thread can be stopped. What the small process survives within its limits, the engine compiles.
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
"""Characters of one grammar, schemas written out."""
SECONDS = 1.0
"""Processor time for one grammar; everyday schemas take some milliseconds."""
REQUEST_SECONDS = 4.0
"""Processor time for all grammars of a request; every tool is one."""
LIMITS: Mapping[str, int | bool] = MappingProxyType(
    {"max_lexer_states": 100_000, "verbose_errors": False}
)
"""Of `llguidance.LLParserLimits`, other than the defaults: each row keeps some 2 kB for each state,
and errors are told to clients."""
MEMORY = 1 << 30
"""Bytes of the small process."""
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
    """Processor time that a request's grammars may still take."""

    seconds: float = REQUEST_SECONDS

    def spend(self, seconds: float) -> None:
        self.seconds -= seconds
        if self.seconds <= 0:
            raise BadRequest(
                f"the grammars of this request take more than {REQUEST_SECONDS:g} s to compile; "
                "send fewer or plainer tools or schemas"
            )


class GrammarTrial:
    """Tries grammars over one vocabulary; safe from any thread.

    size: tokens of the vocabulary. names: ids of its special tokens. The process starts with the
    first grammar and ends with this object.
    """

    def __init__(self, size: int, names: Mapping[str, int]) -> None:
        vocabulary = json.dumps({"size": size, "names": dict(names)}).encode()
        self._setups = {"vocabulary": vocabulary}
        self._processes = BoundedProcesses(CHILD, MEMORY, [json.dumps(dict(LIMITS))])

    def wrong(self, lark: str, allowance: Allowance) -> str:
        """What is wrong with a grammar, or an empty text. Raises what `Allowance.spend` does."""
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
    """Why a process has ended, as what is wrong with the grammar. Raises `RequestFailed`."""
    reason = _ENDS.get(-ended.code) or ended.reason
    if not reason:
        raise RequestFailed(f"the trial of a grammar {ended}") from None
    return reason
