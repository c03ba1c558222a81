"""A call as its grammar writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...records.grammar import CallGrammar, TaggedArguments
from ...records.parameters import listed_parameters, resolved
from .calls import shown_name, written_as_object


def written_call(
    grammar: CallGrammar, name: str, arguments: Mapping[str, Any], schema: Mapping[str, Any]
) -> str:
    """The text of one call, the only one of its reply.

    schema: of the tool's parameters; by it a format tells text from other values.
    """
    before = grammar.before.replace("{name}", shown_name(grammar, name)).replace("{digits}", "0")
    return grammar.open + before + _body(grammar, arguments, schema) + grammar.after + grammar.close


def _body(grammar: CallGrammar, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    tags, known = grammar.tagged, listed_parameters(schema)[0]
    if tags is None or written_as_object(tags, known):
        return json.dumps(arguments, ensure_ascii=False)
    return tags.between.join(
        _argument(tags, key, value, resolved(known.get(key), schema), schema)
        for key, value in arguments.items()
    )


def _argument(
    tags: TaggedArguments, key: str, value: Any, schema: Any, root: Mapping[str, Any]
) -> str:
    bare = tags.writes_text(schema, root) and (isinstance(value, str) or not tags.tells_text)
    text = value if bare and isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    start, end = (tags.text if bare else None) or ("", "")
    after = (bare and tags.text_key_after) or tags.key_after
    close = tags.value_after.replace("{key}", key)
    return f"{tags.key_before}{key}{after}{start}{text}{end}{close}"
