"""Puts a whole reply together from its deltas, as a client does (`read_chunks`). Checks a text
against a `response_format` that no grammar enforced (`check_reply`)."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from ...errors import BadRequest
from ...protocol.event_queue import join_deltas
from ...protocol.events import Delta
from ..constraints.request import response_schema
from .reply import Reply

_MAX_OPENINGS = 100  # brackets in prose at which JSON is tried
_FENCE = re.compile(r"```([^\n`]*)\n(.*?)(?:```|\Z)", re.DOTALL)  # language and text of a block


@dataclass(frozen=True)
class Checked:
    """`parsed`: the first JSON in a text. `is_valid`: whether it fits the schema. `violated`: the
    first violated keyword; empty: none, or there is no JSON."""

    parsed: Any
    is_valid: bool
    violated: str = ""


def find_json(text: str) -> Iterator[Any]:
    """JSON in a text: all of it, then its fenced blocks, then objects and lists in prose."""
    decoder = json.JSONDecoder(parse_constant=_refuse)
    blocks = [body for name, body in _FENCE.findall(text) if name.strip() in ("", "json", "JSON")]
    for candidate in (text, *blocks):
        with suppress(ValueError, RecursionError):
            yield decoder.decode(candidate)
    for opening in islice(re.finditer(r"[\[{]", text), _MAX_OPENINGS):
        with suppress(ValueError, RecursionError):
            yield decoder.raw_decode(text, opening.start())[0]


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def check_reply(text: str, response_format: Mapping[str, Any] | None) -> Checked:
    """Check the first JSON in a text; without a schema, any text is valid. Raises `BadRequest`."""
    schema = response_schema(response_format)
    if schema is None:
        return Checked(None, is_valid=True)
    if not (found := list(islice(find_json(text), 1))):
        return Checked(None, is_valid=False)
    violated = violation(found[0], schema)
    return Checked(found[0], not violated, violated)


def violation(instance: Any, schema: Any) -> str:
    """The first violated keyword; empty: none. Raises `BadRequest` for an invalid schema."""
    import jsonschema  # type: ignore[import-untyped]
    from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]
    from referencing.exceptions import Unresolvable

    validator = jsonschema.Draft202012Validator
    try:
        if isinstance(schema, Mapping) and isinstance(schema.get("$schema"), str):
            validator = jsonschema.validators.validator_for(schema, validator)
        validator.check_schema(schema)
        # the default registry would open any URL of a schema
        first = next(validator(schema, registry=REGISTRY).iter_errors(instance), None)
    except jsonschema.SchemaError as broken:
        raise BadRequest(f"the schema is not valid: {broken.message}") from None
    except (RecursionError, Unresolvable, ValueError) as broken:  # the latter of a malformed URL
        raise BadRequest(f"a reference of the schema leads nowhere: {broken}") from None
    except OverflowError:  # from its division of a number beyond the floats
        return "multipleOf"
    return "" if first is None else str(first.validator or "false")


@dataclass(frozen=True)
class WholeReply:
    """One choice. `calls`: names and JSON text of arguments. `faults`: failures of the parsers."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    finish_reason: str
    faults: tuple[str, ...] = field(default=(), compare=False)

    @property
    def whole_calls(self) -> list[tuple[str, Any]]:
        """Calls with complete arguments, which are decoded."""
        return [(name, json.loads(text)) for name, text in self.calls if _is_json(text)]

    @property
    def cut_calls(self) -> list[tuple[str, str]]:
        """Calls whose arguments are no JSON, because the reply ended in them."""
        return [call for call in self.calls if not _is_json(call[1])]


def put_together(deltas: Iterable[Delta], finish_reason: str) -> WholeReply:
    """The whole of one choice's deltas."""
    whole = join_deltas([*deltas])
    calls = tuple((call.name or "", call.arguments) for call in whole.tool_calls)
    return WholeReply(whole.content, whole.reasoning, calls, finish_reason)


def read_chunks(chunks: Iterable[str], **formats: Any) -> WholeReply:
    """The reply whose text arrives in these pieces. `formats`: arguments of `Reply`."""
    reply = Reply(**formats)
    deltas = [delta for chunk in chunks for delta in reply.push_text(chunk)]
    last, reason = reply.finish("stop")
    return replace(put_together(deltas + last, reason), faults=tuple(reply.faults))


def _is_json(text: str) -> bool:
    with suppress(ValueError, RecursionError):
        json.loads(text)
        return True
    return False
