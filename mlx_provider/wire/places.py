"""The client's names for the parts of a request. The engine's errors and warnings name fields of
its own request: `max_tokens`, `messages[3].content[1]`; other APIs have other names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..errors import MLXProviderError, for_another
from ..protocol.events import Event, Failed

NAME = re.compile(r"(?<![\w.\]'\"])[a-z]\w*(?:\[\d+\]|\.\w+)*")
"""A field's name or path. Text in quotes is a value."""


@dataclass(frozen=True)
class Places:
    of: dict[str, str] = field(default_factory=dict)
    """By our name. Parts of a part follow it."""

    def before(self, inner: Places) -> Places:
        """For a request translated twice: first by these names, then by `inner`."""
        return Places({**self.of, **{ours: self.text(name) for ours, name in inner.of.items()}})

    def text(self, text: str) -> str:
        """A text with the client's names. A plain word counts as a name only at its beginning."""
        return NAME.sub(lambda found: self._name(found[0], first=not found.start()), text)

    def error(self, error: MLXProviderError) -> MLXProviderError:
        named = for_another(error)
        named.message = self.text(error.message)
        named.param = None if error.param is None else self.text(error.param)
        return named

    def events(self, events: list[Event]) -> list[Event]:
        """Only the last event can be an error."""
        last = events[-1] if events else None
        if not isinstance(last, Failed):
            return events
        return [*events[:-1], Failed.of(self.error(last.error.exception()))]

    @contextmanager
    def naming(self) -> Iterator[None]:
        try:
            yield
        except MLXProviderError as error:
            raise self.error(error) from None

    def _name(self, path: str, *, first: bool) -> str:
        if path.isalpha() and not first:
            return path
        for head in _heads(path):
            if head in self.of:
                return self.of[head] + path[len(head) :]
        return path


def _heads(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
