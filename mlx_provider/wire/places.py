"""The parts of a conversation by the names that its client gave them.

Chat reads messages, and its errors and warnings name them: `messages[3].content[1]`. A client of
another API has sent no such list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..errors import MLXProviderError

PATH = re.compile(r"messages\[\d+\](?:\.\w+(?:\[\d+\])?)*")
WHOLE = "messages"


@dataclass(frozen=True)
class Places:
    """The client's name for each part of the messages that has another name there."""

    whole: str = WHOLE
    """Of the whole list."""
    of: dict[str, str] = field(default_factory=dict)
    """By our name. The parts of a part follow it."""

    def text(self, text: str) -> str:
        """A text with the client's names."""
        return PATH.sub(lambda found: self._name(found[0]), text)

    def error(self, error: MLXProviderError) -> MLXProviderError:
        """The error with the client's names."""
        if error.param == WHOLE:
            error.param = self.whole
            if error.message.startswith(WHOLE):
                error.message = self.whole + error.message.removeprefix(WHOLE)
        elif error.param is not None:
            error.param = self.text(error.param)
            error.message = self.text(error.message)
        return error

    def _name(self, path: str) -> str:
        for head in _heads(path):
            if head in self.of:
                return self.of[head] + path[len(head) :]
        return path


def _heads(path: str) -> Iterator[str]:
    """The path, then its parents."""
    while path:
        yield path
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
