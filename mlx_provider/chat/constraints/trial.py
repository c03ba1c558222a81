"""Tries a client's grammar in a separate process before the engine compiles it. llguidance 1.9.1
does not limit all of its work: a chain of references overflows the stack, `multipleOf` and
intersections may never end (derivre 0.3.13, relevance.rs), and threads cannot be stopped."""

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ...bounded_process import BoundedProcesses, ProcessEnded
from ...errors import BadRequest, RequestFailed

MAX_GRAMMAR = 1_000_000  # characters
SECONDS = 1.0  # processor time per grammar; usual schemas take a few milliseconds
REQUEST_SECONDS = 4.0  # processor time for all grammars of a request
LIMITS: Mapping[str, int | bool] = MappingProxyType(
    {"max_lexer_states": 100_000, "verbose_errors": False}
)
"""What differs from the defaults of `llguidance.LLParserLimits`: each row keeps about 2 kB per
state, and errors are short because clients see them."""
MEMORY = 1 << 30  # bytes of a process
CHILD = Path(__file__).with_name("trial_process.py")

_REASONS: Mapping[int, str] = MappingProxyType(
    {
        signal.SIGPROF: f"it takes more than {SECONDS:g} s to compile, or too long for each token",
        signal.SIGSEGV: "it is nested too deep, or refers too far",
        signal.SIGBUS: "it is nested too deep, or refers too far",
    }
)


@dataclass
class Allowance:
    """Processor time that the grammars of a request may still take."""

    seconds: float = REQUEST_SECONDS
    namespace: str = ""  # only requests with the same one share compiled grammars

    def spend(self, seconds: float) -> None:
        """Subtract processor time. Raises `BadRequest` when none is left."""
        self.seconds -= seconds
        if self.seconds <= 0:
            raise BadRequest(
                f"the grammars of this request take more than {REQUEST_SECONDS:g} s to compile; "
                "send fewer or plainer tools or schemas"
            )


class GrammarTrial:
    """Tries grammars for one vocabulary with `size` tokens; `names` has the ids of special tokens.
    Safe from any thread. Its processes start when grammars are tried, and end with this object."""

    def __init__(self, size: int, names: Mapping[str, int]) -> None:
        self._setups = {"vocabulary": json.dumps({"size": size, "names": dict(names)}).encode()}
        self._processes = BoundedProcesses(CHILD, MEMORY, [json.dumps(dict(LIMITS))])

    def find_fault(self, lark: str, allowance: Allowance) -> str:
        """Why a grammar (in Lark syntax) is refused; empty: it is accepted. Its time is taken from
        the allowance. Raises `BadRequest` if that is used up, `RequestFailed` if no trial works."""
        if len(lark) > MAX_GRAMMAR:
            return f"it is longer than {MAX_GRAMMAR} characters"
        message = json.dumps({"lark": lark, "seconds": SECONDS}).encode()
        try:
            found = json.loads(self._processes.ask(message, self._setups))
        except ProcessEnded as ended:
            reason = _REASONS.get(-ended.code) or ended.reason
            if not reason:
                raise RequestFailed(f"the trial of a grammar {ended}") from None
            allowance.spend(SECONDS)
            return reason
        except OSError as error:
            failed = f"the process that tries grammars does not start: {error}"
            raise RequestFailed(failed) from None
        allowance.spend(found["seconds"])
        return str(found["wrong"])
