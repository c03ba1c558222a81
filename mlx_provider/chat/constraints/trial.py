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

MAX_GRAMMAR = 1_000_000
SECONDS = 1.0
"""Processor time per grammar. Usual schemas take a few milliseconds."""
REQUEST_SECONDS = 4.0
"""Processor time for all grammars of a request."""
LIMITS: Mapping[str, int | bool] = MappingProxyType(
    {"max_lexer_states": 100_000, "verbose_errors": False}
)
"""Differences from `llguidance.LLParserLimits`: each row keeps about 2 kB per state, and errors are
sent to clients."""
MEMORY = 1 << 30
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
    seconds: float = REQUEST_SECONDS
    namespace: str = ""
    """Compiled grammars are not shared with other namespaces."""

    def spend(self, seconds: float) -> None:
        self.seconds -= seconds
        if self.seconds <= 0:
            raise BadRequest(
                f"the grammars of this request take more than {REQUEST_SECONDS:g} s to compile; "
                "send fewer or plainer tools or schemas"
            )


class GrammarTrial:
    """Safe from any thread. The process starts with the first grammar and ends with this object.
    `size`: tokens of the vocabulary. `names`: ids of its special tokens."""

    def __init__(self, size: int, names: Mapping[str, int]) -> None:
        vocabulary = json.dumps({"size": size, "names": dict(names)}).encode()
        self._setups = {"vocabulary": vocabulary}
        self._processes = BoundedProcesses(CHILD, MEMORY, [json.dumps(dict(LIMITS))])

    def wrong(self, lark: str, allowance: Allowance) -> str:
        if len(lark) > MAX_GRAMMAR:
            return f"it is longer than {MAX_GRAMMAR} characters"
        message = json.dumps({"lark": lark, "seconds": SECONDS}).encode()
        try:
            found = json.loads(self._processes.ask(message, self._setups))
        except ProcessEnded as ended:
            reason = _ENDS.get(-ended.code) or ended.reason
            if not reason:
                raise RequestFailed(f"the trial of a grammar {ended}") from None
            allowance.spend(SECONDS)
            return reason
        except OSError as error:
            failed = f"the process that tries grammars does not start: {error}"
            raise RequestFailed(failed) from None
        allowance.spend(found["seconds"])
        return str(found["wrong"])
