"""Checks of the objects in a request that another API reads before it is chat."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from ..errors import BadRequest


def objects(
    items: Any, where: str, *, texts: bool = False
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each object of a list and its place in the request; `texts`: plain texts are allowed."""
    if not isinstance(items, list):
        raise BadRequest(
            f"{where} must be a text or a list, got {type(items).__name__}", param=where
        )
    for index, item in enumerate(items):
        at = f"{where}[{index}]"
        if isinstance(item, Mapping):
            yield at, item
        elif isinstance(item, BaseModel):  # a script can pass objects of a reply
            yield at, item.model_dump()
        elif not (texts and isinstance(item, str)):
            raise BadRequest(f"{at} must be an object, got {type(item).__name__}", param=at)


def check_known(value: Any, known: Collection[str], where: str) -> None:
    if not isinstance(value, str) or value not in known:
        raise BadRequest(
            f"{where} is {value!r}, which is not supported: it must be one of {', '.join(known)}",
            param=where,
        )


def check_kind(value: Any, where: str) -> None:
    """The type of a part of an earlier turn; another server's types are allowed."""
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{where} is {value!r}: it must be a text", param=where)


def check_text(part: Mapping[str, Any], where: str) -> None:
    if not isinstance(part.get("text"), str):
        raise BadRequest(f"{where}.text must be a text", param=where)
