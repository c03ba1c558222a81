"""Independent judges of OpenAI's and Anthropic's APIs and of servers: an engine, and a proxy."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from local_server import serving
from mlx_provider.gateway.config import proxy_config, write_config
from mlx_provider.gateway.proxy import start_proxy
from mlx_provider.testing.scripted import Call, Step, script

pytestmark = pytest.mark.judges

JUDGES = ("llm-comply==0.5.0", "llama-benchy==0.4.0", "tool-eval-bench==3.0.0")
REPLAY = "aiperf==0.13.0"
NAME = "o3-claude-opus"
"""llm-comply asks models of such names alone for thoughts."""
FORMS = ("open-responses", "anthropic", "openai-chat")
REASONING = {"chat-reasoning-summary"}
"""Sends `reasoning`, which belongs to the Responses API."""
PASSED = {
    "engine": {"open-responses": 13, "anthropic": 9, "openai-chat": 8},
    "proxy": {"open-responses": 2, "anthropic": 3, "openai-chat": 3},
}
"""LiteLLM's replies lack fields that the schemas require."""
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


@dataclass(frozen=True)
class Judged:
    """What judges ask."""

    place: str
    url: str
    key: str
    model: str
    demo: str
    tokenizer: str


@pytest.fixture(scope="module")
def judges(installed: Callable[..., Path]) -> Path:
    return installed(*JUDGES)


@pytest.fixture(scope="module")
def named(engine: Any) -> str:
    """The scripted model under `NAME`."""
    return str(shutil.copytree(engine.scripted, Path(engine.scripted).with_name(NAME)))


@pytest.fixture(scope="module")
def proxied(engine: Any, named: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judged]:
    """A proxy with our handler before the engine."""
    place = {"api_base": engine.url, "api_key": "the-key"}
    config = proxy_config(NAME, named, **place)
    config["model_list"] += proxy_config("demo", "demo", **place)["model_list"]
    proxy = start_proxy(write_config(config, tmp_path_factory.mktemp("proxy")), os.environ)
    try:
        proxy.wait_ready()
        yield Judged("proxy", proxy.url, proxy.key, NAME, "demo", named)
    finally:
        proxy.stop()


@pytest.fixture(params=["engine", "proxy"])
def judged_one(request: pytest.FixtureRequest, engine: Any, named: str) -> Judged:
    if request.param == "proxy":
        one: Judged = request.getfixturevalue("proxied")
        return one
    return Judged("engine", engine.url, "the-key", named, "demo", named)


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A text over HTTP, from which llama-benchy makes prompts."""
    folder = tmp_path_factory.mktemp("book")
    (folder / "book.txt").write_text("word " * 3000)
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with serving(handler) as server:
        yield f"http://127.0.0.1:{server.server_port}/book.txt"


def run_judge(program: Path, *arguments: str, folder: Path, **variables: str) -> str:
    own = {**os.environ, "HF_HUB_OFFLINE": "1", "HOME": str(folder), "NO_PROXY": "*", **variables}
    ran = subprocess.run(
        [program, *arguments], capture_output=True, text=True, env=own, cwd=folder, timeout=500
    )
    return ran.stdout


@pytest.mark.parametrize("form", FORMS)
def test_llm_comply_is_passed(judged_one: Judged, judges: Path, tmp_path: Path, form: str) -> None:
    one = judged_one
    server = ["-u", one.url + "/v1", "-k", one.key, "-m", one.model]
    said = run_judge(judges / "llm-comply", *server, "--format", form, "--json", folder=tmp_path)
    results = json.loads(said)["results"]
    failed = {each["id"]: each.get("errors") for each in results if each["status"] != "passed"}
    passed = len(results) - len(failed)
    print(one.place, form, passed, "of", len(results))
    assert passed == PASSED[one.place][form], failed
    if one.place == "engine":
        assert failed.keys() <= REASONING, failed


def test_llama_benchy_measures(judged_one: Judged, judges: Path, book: str, tmp_path: Path) -> None:
    file, one = tmp_path / "result.json", judged_one
    said = run_judge(
        judges / "llama-benchy", "--base-url", one.url + "/v1", "--api-key", one.key,
        "--model", one.demo, "--tokenizer", one.tokenizer, "--book-url", book, "--runs", "1",
        "--pp", "128", "--tg", "16", "--concurrency", "1", "4", "--skip-coherence",
        "--exit-on-first-fail", "--format", "json", "--save-result", str(file), folder=tmp_path,
    )  # fmt: skip
    assert file.exists(), said
    runs = json.loads(file.read_text())["benchmarks"]
    assert [run["concurrency"] for run in runs] == [1, 4]
    # none if all tokens came at once, as from a proxy on a busy machine
    assert all(run["tg_throughput"] is None or run["tg_throughput"]["mean"] > 0 for run in runs)


def test_tool_eval_bench_is_completed(judged_one: Judged, judges: Path, tmp_path: Path) -> None:
    """A scripted model passes no scenario; each one ends by an answer of the engine."""
    file, one = tmp_path / "result.json", judged_one
    run_judge(
        judges / "tool-eval-bench", "run", "--base-url", one.url + "/v1", "--api-key", one.key,
        "--model", one.model, "--short", "--json-file", str(file), folder=tmp_path,
    )  # fmt: skip
    found = json.loads(file.read_text())
    results = found["scores"]["scenario_results"]
    assert (found["status"], len(results)) == ("completed", 15)
    assert all("final_answer=You said: " in each["raw_log"] for each in results)


@pytest.fixture(scope="module")
def aiperf(installed: Callable[..., Path]) -> Path:
    return installed(REPLAY)


def test_aiperf_replays_agents_and_reuse(judged_one: Judged, aiperf: Path, tmp_path: Path) -> None:
    """Three agents at once; each conversation grows by a call and its result."""
    trace, out, one = tmp_path / "trace.jsonl", tmp_path / "out", judged_one
    trace.write_text("".join(json.dumps(turn) + "\n" for turn in turns(3)))
    run_judge(
        aiperf / "aiperf", "profile", "--url", one.url, "--api-key", one.key, "--model", one.model,
        "--endpoint-type", "chat", "--streaming", "--custom-dataset-type", "mooncake-trace",
        "--input-file", str(trace), "--tokenizer", one.tokenizer, "--use-server-token-count",
        "--concurrency", "3", "--num-conversations", "3", "--ui", "none", "--no-gpu-telemetry",
        "--no-server-metrics", "--artifact-dir", str(out), folder=tmp_path,
        HF_HUB_OFFLINE="",  # any other value: it takes no folder as tokenizer
    )  # fmt: skip
    found = json.loads((out / "profile_export_aiperf.json").read_text())
    reused = found["overall_usage_prompt_cache_read_pct"]["avg"]
    print(one.place, f"{reused:.0f} % of prompt tokens from the prefix cache")
    assert found["is_complete"]
    assert found["error_summary"] == []
    assert found["request_count"]["avg"] == 12
    assert reused > 50


def turns(agents: int) -> Iterator[dict[str, Any]]:
    """A trace of agents that list folders, as AIPerf reads it."""
    steps = [Step(f"Look {at}.", (Call("bash", {"command": f"ls {at}"}),)) for at in range(3)]
    asked = {"role": "user", "content": script(*steps, Step("Done."))}
    for agent in range(agents):
        messages: list[dict[str, Any]] = [{"role": "system", "content": "Rule. " * 100}, asked]
        for at in range(len(steps) + 1):
            pause = {"delay": 50} if at else {}
            turn = {"session_id": f"agent-{agent}", "messages": messages, "tools": [TOOL]}
            yield {**turn, **pause, "output_length": 60}
            function = {"name": "bash", "arguments": json.dumps({"command": f"ls {at}"})}
            call = {"id": f"call_{at}", "type": "function", "function": function}
            messages = [
                *messages,
                {"role": "assistant", "content": f"Look {at}.", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": f"call_{at}", "content": "file " * 50},
            ]
