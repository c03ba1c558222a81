"""Greedy tokens of a real model equal a NumPy forward pass of the same weights, in any company."""

import pytest

from mlx_provider.protocol.requests import ModelOptions

from .asking import Answer, Judge, Messages, Model, user

pytestmark = pytest.mark.real

PROMPTS = [
    "What is the capital of France?",
    "Why is the sky blue? One sentence.",
    "Write a haiku about rain.",
    "List three primary colours.",
    "Translate to French: good morning, my friend.",
    "What is 12 + 7?",
    "Write a Python function that reverses a string.",
    "Who wrote Romeo and Juliet?",
    "Explain photosynthesis to a child.",
    "Name a mammal that lays eggs.",
    "Schreibe einen Satz über den Winter.",
    "Complete: The quick brown fox",
    "Give me a recipe for pancakes.",
    "What does HTTP 404 mean?",
    "Say hello in Japanese: こんにちは",
    "Tell me a joke about cats 🐈.",
    "How many days has a leap year?",
    "Summarise: The ship left the harbour at dawn, and came back with no fish.",
    "SELECT name FROM users WHERE age > 30; what does this do?",
    "Which is heavier, a kilogram of feathers or of iron?",
    "   spaces\tand\ttabs   \n\nand lines",
    "Describe the sea.",
]
STORY = (
    "A lighthouse keeper counts ships. On Monday he sees four, on Tuesday none, and on Wednesday "
    "a red one with a torn sail that he has seen before. He writes each of them in a green book. "
)
REWRITE = """Repeat this code, with the name `total` in place of `s`:
def mean(values):
    s = 0
    for value in values:
        s = s + value
    return s / len(values)
"""


@pytest.fixture(scope="module")
def together(model: Model) -> list[Answer]:
    started = [model.start(prompt) for prompt in PROMPTS]
    return [each.read() for each in started]


def test_concurrent_prompts_get_reference_tokens(together: list[Answer], judge: Judge) -> None:
    for answer in together:
        judge.check_answer(answer)
    assert "Paris" in together[0].text
    assert {answer.reason for answer in together} == {"stop", "length"}


def test_repeats_get_equal_tokens_from_the_prefixes(model: Model, together: list[Answer]) -> None:
    """The tokens that the reference has approved in company, of every third prompt."""
    for want in together[::3]:
        one = model.ask(want.messages)
        assert one.pieces > 1 or len(one.tokens) < 8
        assert one.usage
        assert one.cached == one.usage.prompt_tokens - 1
        assert one.text == want.text
        assert one.tokens == want.tokens
        assert one.reason == want.reason
        for mine, theirs in zip(one.logprobs, want.logprobs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)


@pytest.mark.parametrize("prompt", ["What is the tallest mountain?", "Name two rivers.", "Why?"])
def test_a_cold_prompt_gets_reference_tokens(model: Model, judge: Judge, prompt: str) -> None:
    answer = model.ask(prompt, 32, salt=prompt)
    assert answer.cached == 0
    judge.check_answer(answer)


def test_each_turn_of_a_conversation_reuses_the_last(model: Model, judge: Judge) -> None:
    messages: Messages = []
    before = 0
    for said in (
        "My name is Maria. " + STORY,
        "How many ships came on Monday?",
        "What is my name?",
    ):
        messages = [*messages, user(said)]
        answer = model.ask(messages, 24)
        judge.check_answer(answer)
        assert answer.cached >= before
        assert answer.usage
        before = answer.usage.prompt_tokens
        messages = [*messages, {"role": "assistant", "content": answer.text}]


def test_a_chunked_prompt_and_streams_get_reference_tokens(chunked: Model, judge: Judge) -> None:
    streams = [chunked.start(prompt, 64) for prompt in PROMPTS[1:4]]
    long = chunked.start(STORY * 8 + "What colour is the book?", 24)
    for started in (long, *streams):
        judge.check_answer(started.read())


def test_drafts_change_no_token(model: Model, judge: Judge) -> None:
    drafted = Model(model.client, model.folder, ModelOptions(drafter="lookup"))
    answer = drafted.ask(REWRITE, 96)
    judge.check_answer(answer)
    assert answer.usage
    assert answer.usage.drafted_tokens >= answer.usage.accepted_tokens > 0
    assert drafted.ask(REWRITE, 96, drafts=False).tokens == answer.tokens


def test_reproducible_gives_equal_bits_alone_and_in_company(model: Model, judge: Judge) -> None:
    steady = Model(model.client, model.folder, ModelOptions(reproducible=True))
    alone = steady.ask(PROMPTS[5], 16)
    judge.check_answer(alone)
    company = [steady.start(prompt, 16) for prompt in PROMPTS[5:12]]
    first, *_ = [started.read() for started in company]
    assert [each.logprob for each in first.logprobs] == [each.logprob for each in alone.logprobs]
    assert first.tokens == alone.tokens


def test_the_reference_rejects_a_wrong_token(together: list[Answer], judge: Judge) -> None:
    """A judge that approves everything would prove nothing."""
    answer = together[0]
    tokens = list(answer.tokens)
    tokens[1] = tokens[1] + 1
    with pytest.raises(AssertionError):
        judge.check(answer.messages, tokens)
