"""The parameters of one request, taken one by one; those that are left are refused by name. What
has no meaning here and changes no answer is ignored; what a client could believe to work is ignored
with a warning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import BadRequest
from ...invalid import shown

TRANSPORT = frozenset({"stream", "stream_options", "metadata", "prompt_cache_retention"})
"""Parameters that other code handles, or that change no answer."""

WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "context_management": (),
    "output_config": (),
    "prediction": (),
    "return_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "web_search_options": (),
}
"""Parameters that get a warning, and the values that ask for nothing."""


class Parameters:
    def __init__(
        self,
        values: Mapping[str, Any],
        settled: Iterable[str] = (),
        ignored: Iterable[str] = (),
    ) -> None:
        """`settled`: names that other code handles, besides `TRANSPORT`. `ignored`: further names
        for the warning."""
        self._settled = (*TRANSPORT, *settled)
        self._ignored = [*ignored]
        self._left = {name: value for name, value in values.items() if value is not None}

    def take(self, name: str, default: Any = None) -> Any:
        """The value of `name`, which then counts as known."""
        return self._left.pop(name, default)

    def flag(self, name: str) -> bool | None:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise BadRequest(f"{name} must be true or false, got {shown(value)}", param=name)
        return value

    def number(self, name: str) -> Any:
        """Refuses a truth value, which is a number in Python."""
        value = self.take(name)
        if isinstance(value, bool):
            raise BadRequest(f"{name} must be a number, got {shown(value)}", param=name)
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.take(name, {})
        if not isinstance(value, Mapping):
            raise BadRequest(f"{name} must be an object, got {shown(value)}", param=name)
        return dict(value)

    def choice(self, name: str, allowed: tuple[object, ...], remedy: str) -> None:
        """Only `allowed` values (all without effect) are served."""
        value = self.take(name)
        if value is not None and value not in allowed:
            raise BadRequest(f"{name}={shown(value)} is not supported: {remedy}", param=name)

    def ignore(self, parts: Iterable[str]) -> None:
        self._ignored += parts

    def ignored(self) -> list[str]:
        """Take parameters without effect; returns the names for the warning."""
        for name in self._settled:
            self.take(name)
        return [*self._ignored] + [
            name
            for name, nothing in WITHOUT_EFFECT.items()
            if (value := self.take(name)) is not None and value not in nothing
        ]

    def rest(self) -> dict[str, Any]:
        rest, self._left = self._left, {}
        return rest

    def refuse_rest(self) -> None:
        if self._left:
            names = ", ".join(sorted(self._left))
            raise BadRequest(f"unknown parameter: {names}", param=min(self._left))
