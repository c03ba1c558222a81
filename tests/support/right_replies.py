"""The replies that the scenarios of `eval tools` want."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mlx_provider_eval.client import Reply, ReplyCall


def right(expected: Any) -> Reply:
    """A reply as it is wanted."""
    if expected.text is not None:
        said = [each[0] if isinstance(each, list) else each for each in expected.text.has]
        return Reply(text=" ".join(["Well:", *said]), finish="stop")
    calls = [next(iter(call.items())) for call in reversed(expected.calls)]
    made = (
        ReplyCall(f"call_{at}", name, json.dumps(dict(values(arguments))))
        for at, (name, arguments) in enumerate(calls)
    )
    return Reply(calls=tuple(made), finish="tool_calls")


def values(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, wanted in arguments.items():
        if not (isinstance(wanted, Mapping) and "$maybe" in wanted):
            yield name, value(wanted)


def value(wanted: Any) -> Any:
    """One that a matcher takes."""
    if isinstance(wanted, list):
        return [value(each) for each in wanted]
    if not isinstance(wanted, Mapping):
        return wanted
    ((sign, inner),) = wanted.items() if len(wanted) == 1 else (("", wanted),)
    made = {
        "$in": lambda: value(inner[0]),
        "$has": lambda: inner,
        "$like": lambda: f" {inner.upper()} .",
        "$lines": lambda: f"\n{inner}\n",
        "$set": lambda: [value(each) for each in reversed(inner)],
        "$python": lambda: "\n".join(f"def {name}(): ..." for name in inner),
    }
    return made[sign]() if sign in made else dict(values(wanted))
