"""The whole way once: a real gateway, and a scripted model that answers right and wrong."""

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from mlx_provider.errors import EngineUnavailable
from mlx_provider.registry import PluginRegistry
from mlx_provider.testing.scripted import Call, Step, build, environment, script
from mlx_provider_eval import commands, needle
from mlx_provider_eval.client import Client
from mlx_provider_eval.needle import Needles
from mlx_provider_eval.scenario import read
from mlx_provider_eval.subjects import LoadedSubject, Result, Subject, load_subjects, make_subjects
from mlx_provider_eval.tools import ToolCalls, knows_tools
from waiting import is_gone, wait_until

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

OSLO = Call("get_weather", {"city": "Oslo"})
ROME = Call("get_weather", {"city": "Rome"})
WANTED = {"calls": [{"get_weather": {"city": "Oslo"}}]}
TEXT: dict[str, Any] = {"text": {"has": ["done"]}}


def case(name: str, *steps: Step, expect: Any = WANTED, **more: Any) -> dict[str, Any]:
    own = {"id": name, "kind": more.pop("kind", "right"), "tools": ["get_weather", "get_time"]}
    return {**own, "say": script(*steps), "expect": expect, **more}


CASES = [
    case("call", Step(calls=(OSLO,))),
    case("escapes", Step(calls=(Call("get_weather", {"city": 'a "ü"\n\\d'}),)),
         expect={"calls": [{"get_weather": {"city": 'a "ü"\n\\d'}}]}),
    case("two", Step("Both.", calls=(ROME, OSLO)),
         expect={"calls": [{"get_weather": {"city": "Oslo"}}, {"get_weather": {"city": "Rome"}}]}),
    case("turns", expect=None, steps=[
        {"say": script(Step(calls=(OSLO,)), Step("It is done.")), "expect": WANTED},
        {"results": {"get_weather": "17"}, "expect": TEXT}]),
    case("required", Step("I would rather talk.", calls=(OSLO,)), choice="required"),
    case("none", Step("It is done."), choice="none", expect=TEXT),
    case("words", Step("It will be cold."), kind="no call"),
    case("other", Step(calls=(Call("get_time", {"city": "Oslo"}),)), kind="wrong tool"),
    case("rome", Step(calls=(ROME,)), kind="wrong argument"),
    case("extra", Step(calls=(OSLO, ROME)), kind="extra call"),
    case("more", Step(calls=(Call("get_weather", {"city": "Oslo", "in": "K"}),)),
         kind="invented argument"),
    case("less", Step(calls=(Call("get_weather", {"town": "Oslo"}),)), kind="against the schema"),
    case("needless", Step(calls=(OSLO,)), expect=TEXT, kind="needless call"),
    case("long", Step(count=90), expect=TEXT, kind="cut off"),
]  # fmt: skip
"""What the model does stands in the script; a case of a fault has its name as its kind."""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a scripted model, its scenarios, and what lets processes find its family."""
    folder = tmp_path_factory.mktemp("own")
    build(folder / "scripted", context_length=8000, merges=500)
    for each in CASES:
        if each["expect"] is None:
            del each["expect"], each["say"]
    words = [each for each in CASES if each["id"] == "words"]
    (folder / "cases.yaml").write_text(yaml.safe_dump({"scenarios": CASES}))
    (folder / "words.yaml").write_text(yaml.safe_dump({"scenarios": words}))
    return folder


@dataclass
class Gateway:
    """One gateway for this file."""

    stages: Generator[LoadedSubject | Result]
    loaded: list[LoadedSubject | Result]

    def again(self) -> Generator[LoadedSubject | Result]:
        """What was loaded, as if for the first time; its end is the gateway's."""
        try:
            yield from self.loaded
        finally:
            self.stages.close()


@pytest.fixture(scope="module")
def gateways(own: Path) -> Iterator[Callable[[], Gateway]]:
    """What gives the gateway of this file: another one, once a test has ended the first."""
    with ExitStack() as stack:
        running: list[Gateway] = []

        def gateway() -> Gateway:
            if not running or of(running[-1].loaded, 0).gateway.proxy.process.poll() is not None:
                running.append(stack.enter_context(served(own)))
            return running[-1]

        yield gateway


@pytest.fixture
def gateway(gateways: Callable[[], Gateway]) -> Gateway:
    return gateways()


def quiet(what: str) -> None: ...


@contextmanager
def served(own: Path) -> Iterator[Gateway]:
    """The scripted model: as it is, with another parser, with no such drafter, unloaded at once."""
    model = str(own / "scripted")
    wanted = make_subjects([model], ["tool_parser=default", "tool_parser=pythonic"])
    wanted.append(Subject(model, {"drafter": "absent"}, "scripted, absent"))
    # a folder of its own, since the subjects of one folder share the weights
    copy = str(shutil.copytree(model, own / "copy", dirs_exist_ok=True))
    wanted.append(Subject(copy, {"keep_alive": 0}, "scripted, unloaded"))
    environ = {**os.environ, **environment(own / "site"), "HF_HUB_OFFLINE": "1"}
    environ["MLX_PROVIDER_IDLE_TIMEOUT"] = "900"  # it must not end between tests
    with closing(load_subjects(wanted, quiet, environ)) as stages:
        yield Gateway(stages, [next(stages) for _ in wanted])


@pytest.fixture
def loaded(gateway: Gateway) -> list[LoadedSubject | Result]:
    return gateway.loaded


def of(found: list[LoadedSubject | Result], number: int) -> LoadedSubject:
    each = found[number]
    assert isinstance(each, LoadedSubject), each
    return each


def test_gateway_replies_are_judged(loaded: list[LoadedSubject | Result], own: Path) -> None:
    plan = ToolCalls(read([own / "cases.yaml"]), max_tokens=120)
    result = plan.measure(of(loaded, 0), quiet)
    faults = {case["name"]: case["fault"] for case in result["cases"]}
    kinds = {case["name"]: case["kind"] for case in result["cases"]}
    assert faults == {name: "" if kind == "right" else kind for name, kind in kinds.items()}
    assert result["kinds"]["right"] == [6, 6]
    assert (result["passed"], result["asked"]) == (6, len(CASES))
    assert result["tool_parser"] == "hermes"
    (rome,) = (case for case in result["cases"] if case["name"].endswith("rome"))
    assert rome["why"] == 'get_weather: city is "Rome", not "Oslo"'
    assert rome["transcript"][-1]["reply"]["calls"][0]["arguments"] == '{"city": "Rome"}'


def test_a_wrong_tool_parser_is_reported_as_call_in_text(
    loaded: list[LoadedSubject | Result], own: Path
) -> None:
    asked = [each for each in read([own / "cases.yaml"]) if each.id in ("call", "turns")]
    result = ToolCalls(asked).measure(of(loaded, 1), quiet)
    assert result["faults"] == {"call in text": 2}
    assert result["label"] == "scripted, tool_parser=pythonic"


def test_a_subject_that_does_not_load_is_skipped_with_its_reason(
    loaded: list[LoadedSubject | Result],
) -> None:
    absent, unloaded = loaded[2:]
    assert isinstance(absent, dict)
    assert isinstance(unloaded, dict)
    assert "drafter" in absent["skipped"]
    assert unloaded["skipped"].endswith("leave keep_alive out")


def test_a_needle_is_found_at_each_length_and_depth(
    loaded: list[LoadedSubject | Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model knows the first of two codes, whatever the question."""
    answer = script(Step(f"It is {needle.locker(0)[1]}."))
    monkeypatch.setattr(needle, "QUESTION", answer.replace("{", "{{").replace("}", "}}"))
    plan, scripted = Needles(least=600, limit=1000, needles=2, max_tokens=30), of(loaded, 0)
    result = plan.measure(scripted, quiet)
    assert (result["limit"], result["limited_by"]) == (1000, "--limit")
    assert [cell["length"] for cell in result["cells"]] == [600] * 5 + [1000] * 5
    assert [cell["depth"] for cell in result["cells"]] == [0, 25, 50, 75, 100] * 2
    counts = {(cell["found"], cell["asked"], cell["failed"]) for cell in result["cells"]}
    missed = {miss["wanted"] for cell in result["cells"] for miss in cell["missed"]}
    assert (counts, missed) == ({(1, 2, 0)}, {needle.locker(1)[1]})
    assert all(cell["length"] - 250 < cell["tokens"] <= cell["length"] for cell in result["cells"])
    assert Needles().find_limit(scripted) == (8000 - 64 - 1, "the model's context")


def test_token_counts_equal_the_usage_of_replies(loaded: list[LoadedSubject | Result]) -> None:
    scripted = of(loaded, 0)
    client = Client(scripted, 4, {})
    messages = [{"role": "user", "content": script(Step("It is Paris."))}]
    reply = client.ask(messages)
    client.close()
    assert reply.prompt_tokens == scripted.count(messages)


def test_a_template_that_ignores_tools_is_detected(loaded: list[LoadedSubject | Result]) -> None:
    class Deaf:
        def count(self, request: Any) -> int:
            return 7

    scripted = of(loaded, 0)
    deaf = replace(scripted, gateway=replace(scripted.gateway, engine=Deaf()))  # type: ignore[arg-type]
    assert not knows_tools(deaf)
    assert knows_tools(scripted)


def test_eval_tools_prints_a_comparison_and_writes_its_result_file(
    loaded: list[LoadedSubject | Result], own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the start of the gateway, which is that of this file."""
    monkeypatch.setattr(
        "mlx_provider_eval.subjects.load_subjects", lambda *_: (each for each in loaded)
    )
    monkeypatch.setattr("mlx_provider_eval.subjects.check_subjects", lambda *_: None)
    out = tmp_path / "tools.json"
    arguments = ["tools", "demo", "--scenarios", str(own / "words.yaml"), "--out", str(out)]
    done = CliRunner().invoke(
        commands.evaluate, arguments, obj=PluginRegistry(), catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    assert "scripted, absent: not measured" in done.stderr
    assert "scripted, tool_parser=pythonic" in done.stdout
    result = json.loads(out.read_text())
    assert result["versions"]["mlx-provider"]
    assert len(result["scenarios_digest"]) == 12
    assert next(each["label"] for each in result["subjects"]) == "scripted, tool_parser=default"
    (failed,) = (case for case in result["subjects"][0]["cases"] if case["fault"])
    assert (failed["name"], failed["fault"]) == ("no call/words", "no call")
    assert "It will be cold." in str(failed["transcript"])


def test_an_ended_gateway_is_an_error(loaded: list[LoadedSubject | Result], tmp_path: Path) -> None:
    scripted = of(loaded, 0)
    (tmp_path / "proxy.log").write_text("first\nout of memory\n")
    with subprocess.Popen(["false"]) as ended, socket.socket() as taken:
        ended.wait()
        taken.bind(("127.0.0.1", 0))  # nobody else may listen there meanwhile
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        proxy = replace(scripted.gateway.proxy, process=ended, url=url, log=tmp_path / "proxy.log")
        client = Client(replace(scripted, gateway=replace(scripted.gateway, proxy=proxy)), 4, {})
        with pytest.raises(
            EngineUnavailable, match="ended with exit code 1: first / out of memory"
        ):
            client.ask([{"role": "user", "content": "Hi"}])
        client.close()


def test_sigterm_to_eval_ends_its_proxy_and_engine(
    gateway: Gateway, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of an answer."""
    scripted = of(gateway.loaded, 0)
    proxy, engine = scripted.gateway.proxy, scripted.gateway.engine.health().pid
    asked = {"id": "a", "kind": "k", "tools": ["get_time"], "expect": TEXT}
    asked["say"] = script(Step(count=900, slow=0.5))
    (own / "slow.yaml").write_text(yaml.safe_dump({"scenarios": [asked]}))
    monkeypatch.setattr("mlx_provider_eval.subjects.load_subjects", lambda *_: gateway.again())
    monkeypatch.setattr("mlx_provider_eval.subjects.check_subjects", lambda *_: None)
    threading.Thread(target=end_when_it_runs, args=(scripted,), daemon=True).start()
    arguments = ["tools", "demo", "--scenarios", str(own / "slow.yaml")]
    done = CliRunner().invoke(commands.evaluate, arguments, obj=PluginRegistry())
    assert done.exit_code == 128 + signal.SIGTERM, done.output
    assert proxy.process.poll() is not None
    assert not proxy.log.parent.exists()
    wait_until(lambda: is_gone(engine))  # who started it hears of that in a thread


def end_when_it_runs(scripted: LoadedSubject) -> None:
    wait_until(lambda: scripted.gateway.engine.health().running)
    os.kill(os.getpid(), signal.SIGTERM)
