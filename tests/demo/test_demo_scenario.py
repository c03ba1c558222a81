"""The demo's claims and its failures, without any process."""

from types import SimpleNamespace

import pytest

from mlx_provider.demo import Scenario

ANSWERS = {
    "Tell me a story.": "Once upon a time",
    "My name is Maria.": "Nice to meet you, Maria!",
    "What is my name?": "Your name is Maria.",
    "What is the capital of France?": "The capital of France is Paris.",
    "Count from 1 to 5.": "1, 2, 3, 4, 5.",
    "Say: BANANA": "BANANA",
}


class FakeClient:
    """Just enough of `openai.OpenAI`."""

    def __init__(self, answers):
        self.answers = answers
        self.chat = SimpleNamespace(completions=self)

    def create(self, *, messages, stream=False, **more):
        text = self.answers[messages[-1]["content"]]
        if not stream:
            message = SimpleNamespace(content=text)
            return SimpleNamespace(choices=[SimpleNamespace(message=message)])
        chunks = [_chunk(letter) for letter in text]
        return [*chunks, _chunk(None, "stop"), SimpleNamespace(choices=[])]


def _chunk(text, finish=None):
    choice = SimpleNamespace(delta=SimpleNamespace(content=text), finish_reason=finish)
    return SimpleNamespace(choices=[choice])


def checks(answers):
    scenario = Scenario(FakeClient(answers), "demo")
    pieces = []
    same, recalled = scenario.story(pieces.append), scenario.recall(lambda piece: None)
    assert "".join(pieces) == answers["Tell me a story."]
    return [check.passed for check in (same, recalled, *scenario.at_once())]


def test_the_demo_passes_with_right_answers():
    assert checks(ANSWERS) == [True] * 5


@pytest.mark.parametrize(
    ("question", "answer", "failing"),
    [("Tell me a story.", "", 0), ("What is my name?", "Bob.", 1), ("Count from 1 to 5.", "", 3)],
)
def test_a_wrong_answer_fails_only_its_own_check_of_the_demo(question, answer, failing):
    passed = checks({**ANSWERS, question: answer})
    assert passed.index(False) == failing
    assert passed.count(False) == 1
