"""The demo's claims and its failures, without any process."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_provider.demo import proxy as proxy_module
from mlx_provider.demo import stage
from mlx_provider.demo.config import proxy_config, write_config
from mlx_provider.demo.proxy import port_taken, require_proxy, start_proxy
from mlx_provider.demo.scenario import NAME, Scenario
from mlx_provider.errors import EngineUnavailable, NotInstalled

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
        usage = SimpleNamespace(
            prompt_tokens=9,
            completion_tokens=len(text),
            prompt_tokens_details=SimpleNamespace(cached_tokens=4),
        )
        chunks = [_chunk(letter) for letter in text]
        return [*chunks, _chunk(None, "stop"), SimpleNamespace(choices=[], usage=usage)]


def _chunk(text, finish=None):
    choice = SimpleNamespace(delta=SimpleNamespace(content=text), finish_reason=finish)
    return SimpleNamespace(choices=[choice])


def checks(answers):
    scenario = Scenario(FakeClient(answers), "demo")
    pieces = []
    story, same = scenario.story(pieces.append)
    recall, recalled = scenario.recall()
    assert "".join(pieces) == story.text
    assert (recall.prompt_tokens, recall.cached_tokens) == (9, 4)
    return [check.passed for check in (same, recalled, *scenario.at_once())]


def test_right_answers_pass():
    assert checks(ANSWERS) == [True] * 5


@pytest.mark.parametrize(
    ("question", "failing"),
    [("Tell me a story.", 0), ("What is my name?", 1), ("Count from 1 to 5.", 3)],
)
def test_a_wrong_answer_fails_its_check(question, failing):
    passed = checks({**ANSWERS, question: ""})
    assert passed.index(False) == failing
    assert passed.count(False) == 1


def test_recall_needs_the_name():
    assert NAME in ANSWERS["What is my name?"]


def test_the_config_names_handler_and_model(tmp_path):
    config = proxy_config("demo", "org/name", api_base="http://x")
    entry = config["model_list"][0]
    assert entry["litellm_params"] == {"model": "mlx/org/name", "api_base": "http://x"}
    assert config["general_settings"]["cancel_on_disconnect"] is True
    assert "master_key" not in write_config(config, tmp_path).read_text()


def test_a_missing_extra_is_named(monkeypatch):
    require_proxy()
    monkeypatch.setattr(proxy_module, "NEEDED", ("no_such_package",))
    with pytest.raises(NotInstalled, match=r"mlx-provider\[proxy\]"):
        require_proxy()


def test_a_port_in_use_is_named(tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert port_taken(port)
        with pytest.raises(EngineUnavailable, match=f"port {port} is in use"):
            start_proxy(tmp_path / "config.yaml", {}, port=port)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="a system without /proc")
def test_an_engine_that_nobody_waits_for_has_ended(monkeypatch):
    monkeypatch.setattr(stage, "END_LIMIT", 5.0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not stage._ended(process.pid)
        process.kill()
        assert stage._gone(process.pid)
