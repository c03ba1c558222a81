"""The choices with the highest log-probability per token.

Parts of `/completions` only: raw prompts, several at once, and their echo.

The form in which a client wants an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any, Self

from ...errors import BadRequest
from ...invalid import shown
from .answer import Answer, names_of
from .parameters import Parameters


@dataclass(frozen=True)
class BestOf:
    """`made` choices of each prompt, of which the best `wanted` are returned."""

    made: int
    wanted: int
    logprobs: bool

    def chosen(self, answers: Sequence[Answer]) -> list[Answer]:
        groups = range(0, len(answers), self.made)
        kept = [each for at in groups for each in self._best(answers[at : at + self.made])]
        if not self.logprobs:
            for answer in kept:
                answer.logprobs.clear()
        return kept

    def _best(self, answers: Sequence[Answer]) -> list[Answer]:
        return sorted(answers, key=_per_token, reverse=True)[: self.wanted]


def _per_token(answer: Answer) -> float:
    """The mean; an empty choice counts as certain."""
    found = [token.logprob or 0.0 for token in answer.logprobs]
    return fsum(found) / len(found) if found else 0.0


COMPLETION_TOKENS = 16
"""Default of `max_tokens` in `/completions`, as in OpenAI's API."""
MAX_CHOICES = 128
"""Prompts times `n` in one request, as for a single prompt."""
MAX_LOGPROBS = 20


def completions(
    params: Parameters, prompts: Sequence[Any], best: BestOf | None, shared: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The fields of each prompt's request, beside those that are `shared`. Raises `BadRequest` that
    names the parameter."""
    params.choice("suffix", ("",), "write the model's own fill-in-the-middle tokens into prompt")
    params.take("best_of")
    fields: dict[str, Any] = {"echo": params.flag("echo") or False, **_logprobs(params)}
    if best is not None and fields["echo"]:
        raise BadRequest("best_of with echo is not supported: leave out echo", param="best_of")
    if best is not None:
        fields |= {"n": best.made, "logprobs": True}
    if "max_tokens" not in shared:
        fields["max_tokens"] = COMPLETION_TOKENS
    n = {**shared, **fields}.get("n", 1)
    if isinstance(n, int) and n * len(prompts) > MAX_CHOICES:
        raise BadRequest(
            f"prompt: {len(prompts)} prompts with n={n} make more than {MAX_CHOICES} choices: "
            "send them in several requests",
            param="prompt",
        )
    return [{"prompt": prompt, **fields} for prompt in prompts]


def listed(given: Any, name: str) -> list[Any]:
    """A text, token ids, or a list of these, as a list. Raises `BadRequest` that names the item."""
    items = [given] if isinstance(given, str) or _is_tokens(given) else given
    if not isinstance(items, list) or not items:
        raise BadRequest(f"{name} {_SHAPES}, got {type(items).__name__}", param=name)
    for index, each in enumerate(items):
        if not isinstance(each, str) and not _is_tokens(each):
            at = f"{name}[{index}]"
            raise BadRequest(f"{at}: each {name} {_SHAPES}", param=at)
    return items


_SHAPES = "must be a text, a list of token ids, or a list of these, and not empty"


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def best_of(values: Mapping[str, Any]) -> BestOf | None:
    """`None`: no more choices than wanted. Raises `BadRequest` for an invalid number."""
    made, wanted = values.get("best_of"), values.get("n", 1)
    if made is None or made == wanted:
        return None
    if type(made) is not int or type(wanted) is not int or not wanted < made <= MAX_CHOICES:
        raise BadRequest(
            f"best_of must be a whole number from n ({shown(wanted)}) to {MAX_CHOICES}, got "
            f"{shown(made)}",
            param="best_of",
        )
    if values.get("stream"):
        raise BadRequest(
            "best_of is known when all choices have ended: leave out stream", param="best_of"
        )
    return BestOf(made, wanted, logprobs=values.get("logprobs") is not None)


def _logprobs(params: Parameters) -> dict[str, Any]:
    count = params.take("logprobs")
    if count is None:
        return {}
    if type(count) is not int or not 0 <= count <= MAX_LOGPROBS:
        raise BadRequest(
            f"logprobs must be a whole number from 0 to {MAX_LOGPROBS}, got {count!r}",
            param="logprobs",
        )
    return {"logprobs": True, "top_logprobs": count}


@dataclass(frozen=True)
class AnswerForm:
    legacy: bool = False
    """Sends `functions` in place of `tools`."""
    text: bool = False
    """From `/completions`."""
    timings: bool = False
    best_of: BestOf | None = None
    custom: frozenset[str] = frozenset()

    @classmethod
    def of(cls, values: Mapping[str, Any], *, text: bool) -> Self:
        """Raises `BadRequest` for a wrong `best_of`."""
        best = best_of(values) if text else None
        custom = names_of(values.get("tools"))
        return cls("functions" in values, text, values.get("timings") is True, best, custom)
