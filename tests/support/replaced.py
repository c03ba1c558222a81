"""Attributes with other values for a while, where no test runner is at hand."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol
from unittest import mock


class Patch(Protocol):
    """What puts a value in an attribute's place until its end; pytest's `MonkeyPatch` does."""

    def setattr(self, target: object, name: str, value: object) -> None: ...


class Replaced(ExitStack):
    """A `Patch`: what it replaced is put back, last first, as it is left."""

    def setattr(self, target: object, name: str, value: object) -> None:
        """Raises `AttributeError` where there is no such attribute."""
        self.enter_context(mock.patch.object(target, name, value))


def wrap(patch: Patch, target: object, name: str, make: Callable[[Any], Any]) -> None:
    """Put `make(original)` in the place of an attribute."""
    patch.setattr(target, name, make(getattr(target, name)))
