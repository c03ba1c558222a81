"""Limits of one request's content on every route, and pydantic types with them. They are far above
real use: some hundred tools, some thousand messages, few stop strings (OpenAI permits four)."""

from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

MAX_STOPS = 64
MAX_STOP_LENGTH = 1024  # characters
MAX_TOKEN_IDS = 1024
"""Entries of `logit_bias` and `stop_token_ids`: the sampler walks them for every token."""
MAX_NAME = 4096
"""Characters of names, such as a model's id, which may be a path."""
MAX_MESSAGES = 10_000
MAX_TOOLS = 2048
MAX_INPUTS = 2048
"""Texts of one embedding request, as in OpenAI's API."""
MAX_INPUT_TOKENS = 2**22  # of one embedding request
MAX_WARM = 64
"""Prompts of one model that are prefilled before a tenant's first request."""
MAX_VALUES = 200_000
"""Objects, lists, texts and numbers in one JSON value, at any depth."""
MAX_FIELDS = 256
"""Fields of one object, known or not, and names in a list of fields."""
MAX_DEPTH = 100  # levels of objects and lists in one JSON value
PIECE = 2**16  # characters that are encoded at a time

T = TypeVar("T")


@dataclass
class ValueCounter:
    """Counts the values in a JSON text that arrives in pieces, fast and never fewer than
    `check_json` does: strings, and outside of them commas and opening brackets."""

    count: int = 0
    _in_string: bool = False
    _rest: bytes = field(default=b"", repr=False)  # a backslash that escapes the next character

    def take(self, piece: bytes) -> None:
        """Add the next piece."""
        piece = (self._rest + piece).replace(b"\\\\", b"__")
        cut = len(piece) - piece.endswith(b"\\")  # its escaped character comes later
        parts = piece[:cut].replace(b'\\"', b"__").split(b'"')
        self._rest = piece[cut:]
        outside = parts[self._in_string :: 2]
        self.count += sum(
            part.count(b",") + part.count(b"[") + part.count(b"{") for part in outside
        )
        self.count += len(parts) // 2
        self._in_string ^= len(parts) % 2 == 0  # an odd number of quotes

    def take_text(self, text: str) -> None:
        """Add a complete text, in pieces, so that it is not copied as a whole."""
        for start in range(0, len(text), PIECE):
            self.take(text[start : start + PIECE].encode(errors="replace"))


def check_json(value: T) -> T:
    """Return the value. Raises `PydanticCustomError` if it is too deep, too large or no Unicode."""
    todo: list[tuple[Any, int]] = [(value, 0)]
    count = 0
    while todo:
        each, depth = todo.pop()
        if isinstance(each, str):
            _check_text(each)
            continue
        inner = _children(each)
        count += len(inner)
        if depth + bool(inner) > MAX_DEPTH:
            raise PydanticCustomError("too_deep", f"nested deeper than {MAX_DEPTH} levels")
        if count > MAX_VALUES:
            raise PydanticCustomError("too_many", f"holds more than {MAX_VALUES} values")
        todo.extend((one, depth + 1) for one in inner)
    return value


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, list) else []


def _check_text(text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise PydanticCustomError(
                "no_unicode", "a text holds half of a surrogate pair, which is no character"
            ) from None


def _check_name(name: str) -> str:
    if "\0" in name:
        raise PydanticCustomError("no_name", "holds a NUL character")
    return name


def check_field_count(value: T) -> T:
    """Like `check_json`, for an object with too many fields: to report each one takes seconds."""
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        raise PydanticCustomError("too_many", f"has more than {MAX_FIELDS} fields")
    return value


def _at_most(limit: int) -> BeforeValidator:
    def check(values: Any) -> Any:
        if isinstance(values, list | dict) and len(values) > limit:
            context = {"max_length": limit, "actual_length": len(values)}
            raise PydanticCustomError("too_long", "too many entries", context)
        return values

    return BeforeValidator(check)  # before the entries are validated one by one


Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME), AfterValidator(_check_name)]
Label = Annotated[str, Field(max_length=MAX_NAME)]  # any text, also an empty one
JsonObject = Annotated[dict[str, Any], AfterValidator(check_json)]
Messages = Annotated[
    list[dict[str, Any]], Field(max_length=MAX_MESSAGES), AfterValidator(check_json)
]
Tools = Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS), AfterValidator(check_json)]
StopStrings = Annotated[
    list[Annotated[str, Field(max_length=MAX_STOP_LENGTH)]], Field(max_length=MAX_STOPS)
]
Tokens = Annotated[list[int], Field(fail_fast=True)]
"""May be millions; only the first wrong one is reported."""
Ignored = Annotated[list[str], Field(max_length=MAX_FIELDS, fail_fast=True)]  # unused parameters
Inputs = Annotated[list[str | Tokens], _at_most(MAX_INPUTS), Field(min_length=1)]
TokenIds = Annotated[list[int], Field(max_length=MAX_TOKEN_IDS)]
TokenBias = Annotated[dict[int, float], _at_most(MAX_TOKEN_IDS)]
