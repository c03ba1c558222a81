"""A fact in a long prompt, and drafts where a reply repeats its prompt.

`pytest -rP` shows what the model finds and how many drafts hold.
"""

import random

import pytest

from mlx_provider.protocol.requests import ModelOptions

from .asking import Judge, Model

pytestmark = pytest.mark.real

NEEDLE = "The pass key of the harbour is 4817. Remember it. "
QUESTION = "\nWhat is the pass key of the harbour?"
SUBJECTS = ("The keeper", "A sailor", "The baker", "My neighbour", "An old fisherman", "The child")
VERBS = ("counts", "paints", "repairs", "looks at", "sells", "remembers", "carries")
THINGS = ("a boat", "the nets", "two lamps", "a green door", "the bread", "an empty box", "a map")
PLACES = ("by the pier", "at noon", "in the rain", "behind the church", "before the storm")
JUDGED = 1024
"""Tokens up to which the reference, which takes minutes for more, judges the answer."""
CODE = """\
def mean(values):
    s = 0
    for value in values:
        s = s + value
    return s / len(values)


def variance(values):
    m = mean(values)
    s = 0
    for value in values:
        s = s + (value - m) ** 2
    return s / len(values)
"""
REWRITES = [
    f"Repeat this code exactly:\n{CODE}",
    f"Add a docstring to each function of this code and repeat the rest:\n{CODE}",
    f"Write this code again with `total` in place of `s`:\n{CODE}",
]


def haystack(model: Model, tokens: int) -> str:
    """Sentences of at most so many tokens, with the needle in their middle."""
    dice = random.Random(tokens)
    parts = (SUBJECTS, VERBS, THINGS, PLACES)
    sentences: list[str] = []
    for _ in range(tokens // 11):  # tokens of a long sentence
        sentences.append(" ".join(dice.choice(each) for each in parts) + ". ")
    sentences.insert(len(sentences) // 2, NEEDLE)
    return "".join(sentences)


@pytest.mark.parametrize("tokens", [1024, 2048, 4096, 7900])
def test_a_number_in_a_long_prompt_is_recalled(model: Model, judge: Judge, tokens: int) -> None:
    answer = model.ask(haystack(model, tokens) + QUESTION, 24)
    assert answer.usage
    print(f"{answer.usage.prompt_tokens} prompt tokens: {answer.text!r}")
    assert "4817" in answer.text
    if tokens <= JUDGED:
        judge.check_answer(answer)


@pytest.mark.parametrize("said", REWRITES)
def test_lookup_drafts_keep_a_rewritten_text(model: Model, judge: Judge, said: str) -> None:
    answer = Model(model.client, model.folder, ModelOptions(drafter="lookup")).ask(said, 160)
    judge.check_answer(answer)
    assert answer.usage
    held, drafted = answer.usage.accepted_tokens, answer.usage.drafted_tokens
    assert drafted
    print(f"{held} of {drafted} drafts held in {answer.usage.completion_tokens} tokens")
