"""`mlx-provider chat`, over a service whose replies are scripted."""

import base64
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from command_line import invoke
from in_process import InProcessClient
from mlx_provider.cli.demo import Conversation
from mlx_provider.errors import BadRequest, ContextTooLong, ModelNotFound, RequestFailed
from mlx_provider.protocol.event_queue import EventQueue
from mlx_provider.protocol.events import (
    Accepted,
    Delta,
    Done,
    ErrorBody,
    Event,
    Failed,
    Finish,
    Timings,
    ToolCallDelta,
    Usage,
)
from mlx_provider.protocol.health import Health
from mlx_provider.protocol.requests import GenerateRequest
from mlx_provider.serving.service import ChatService

USAGE = Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=2)
TIMINGS = Timings(queued=0, prefill=0, first_token=0.1, total=0.2, tokens_per_second=10)
END = [Finish(reason="stop"), Done(usage=USAGE, timings=TIMINGS)]


class Scripted(ChatService):
    """Answers each request with the next script; keeps the requests and what was cancelled."""

    def __init__(self, *scripts: list[Event] | Exception) -> None:
        self.scripts = list(scripts)
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[str] = []

    def submit(self, request: GenerateRequest, queue: EventQueue) -> Accepted:
        self.requests.append(request)
        script = self.scripts.pop(0)
        if isinstance(script, Exception):
            raise script
        queue.put(script)
        return Accepted(id=request.id, model=request.model, prompt_tokens=9, max_tokens=99)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def health(self) -> Health:
        return Health(ok=True, version="0", pid=0, device="none", blas="none")


def talk(
    monkeypatch: pytest.MonkeyPatch, service: Scripted, typed: str, *options: str
) -> tuple[str, BaseException | None]:
    client = InProcessClient(service)
    monkeypatch.setattr("mlx_provider.client.connection.connect", lambda *address: client)
    result = invoke("chat", *options, input=typed)
    return result.stdout, result.exception


def test_chat_sends_the_earlier_turns_with_each_message(monkeypatch: pytest.MonkeyPatch) -> None:
    first = [Delta(reasoning="hm "), Delta(content="Hello "), Delta(content="Ada."), *END]
    service = Scripted(first, [Delta(content="Ada"), *END])
    typed = "My name is Ada.\n\nWho am I?\n"
    shown, error = talk(monkeypatch, service, typed, "mlx/org/model", "--system", "Be brief.")
    assert error is None
    assert "hm Hello Ada.\n[2 tokens, 10 tok/s; prompt 9, of which 4 from the cache]\n" in shown
    assert [request.model for request in service.requests] == ["org/model"] * 2
    assert service.requests[1].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada."},
        {"role": "user", "content": "Who am I?"},
    ]


def test_chat_sends_images_with_the_first_message_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    paths = [tmp_path / "a.png", tmp_path / "b.jpg"]
    for path in paths:
        path.write_bytes(path.name.encode())
    service = Scripted(END, END)
    options = [option for path in paths for option in ("--image", str(path))]
    talk(monkeypatch, service, "What?\nAnd?\n", *options)
    messages = service.requests[1].messages
    parts = messages[0]["content"]
    urls = [part["image_url"]["url"] for part in parts[:2]]
    assert urls[0] == "data:image/png;base64," + base64.b64encode(b"a.png").decode()
    assert urls[1].startswith("data:image/jpeg;base64,")
    assert parts[2] == {"type": "text", "text": "What?"}
    assert messages[2] == {"role": "user", "content": "And?"}


def test_chat_prints_tool_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    call = [
        Delta(tool_calls=[ToolCallDelta(index=0, id="c", name="roll")]),
        Delta(tool_calls=[ToolCallDelta(index=0, arguments='{"sides": 6}')]),
    ]
    shown, _ = talk(monkeypatch, Scripted([*call, *END]), "roll\n")
    assert 'roll {"sides": 6}' in shown


@pytest.mark.parametrize("name", ["nosuch", "./nosuch", "small.gguf"])
def test_a_model_that_does_not_exist_is_an_error_before_the_first_line(
    monkeypatch: pytest.MonkeyPatch, name: str, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.gguf").touch()
    service = Scripted()
    _, error = talk(monkeypatch, service, "", name)
    assert isinstance(error, ModelNotFound | BadRequest)
    assert service.requests == []


def test_a_chat_in_a_terminal_goes_on_after_an_error_and_reports_it_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlx_provider.cli.demo.is_terminal", lambda: True)
    for scripts, code in (([ContextTooLong("no"), END], None), ([END, ContextTooLong("no")], 1)):
        shown, error = talk(monkeypatch, Scripted(*scripts), "hello\nagain\n")
        assert "error: no" in shown
        assert getattr(error, "code", None) == code


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(ContextTooLong("too long"), id="refused"),
        pytest.param([Failed(error=ErrorBody.of(RequestFailed("too long")))], id="failed"),
    ],
)
def test_an_error_ends_a_piped_chat(
    monkeypatch: pytest.MonkeyPatch, script: list[Event] | Exception
) -> None:
    service = Scripted(script)
    _, error = talk(monkeypatch, service, "hello\nagain\n")
    assert isinstance(error, ContextTooLong | RequestFailed)
    assert len(service.requests) == 1


def test_a_failed_turn_is_not_added_to_the_conversation() -> None:
    service = Scripted(ContextTooLong("too long"))
    before = [{"role": "system", "content": "Be brief."}]
    conversation = Conversation(InProcessClient(service), "demo", before)
    with pytest.raises(ContextTooLong):
        conversation.say("a long text", Console(file=StringIO()))
    assert conversation.messages == before


def test_ctrl_c_in_chat_cancels_and_keeps_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Scripted([Delta(content="One, two, ")])
    conversation = Conversation(InProcessClient(service), "demo", [])
    reading = iter([[Delta(content="One, two, ")]])

    def get(self: EventQueue, timeout: float | None = None) -> list[Event]:
        try:
            return next(reading)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(EventQueue, "get", get)
    shown = StringIO()
    conversation.say("Count.", Console(file=shown))
    assert shown.getvalue() == "One, two,  (stopped)\n"
    assert service.cancelled == [service.requests[0].id]
    assert conversation.messages[-1] == {"role": "assistant", "content": "One, two, "}
