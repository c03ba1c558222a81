"""Independent judges of OpenAI's and Anthropic's APIs and of servers, against an engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.judges

JUDGES = ("llm-comply==0.5.0", "llama-benchy==0.4.0", "tool-eval-bench==3.0.0")
NAME = "o3-claude-opus"
"""llm-comply asks models of such names alone for thoughts."""
REFUSED = {
    "open-responses": set[str](),
    "anthropic": set[str](),
    "openai-chat": {"chat-reasoning-summary"},  # `reasoning` is of the Responses API
}


@pytest.fixture(scope="module")
def judges(installed: Callable[..., Path]) -> Path:
    return installed(*JUDGES)


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A text over HTTP, from which llama-benchy makes prompts."""
    folder = tmp_path_factory.mktemp("book")
    (folder / "book.txt").write_text("word " * 3000)
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/book.txt"
        server.shutdown()
        thread.join()


def judged(program: Path, *arguments: str, folder: Path) -> str:
    own = {**os.environ, "HF_HUB_OFFLINE": "1", "HOME": str(folder), "NO_PROXY": "*"}
    ran = subprocess.run(
        [program, *arguments], capture_output=True, text=True, env=own, cwd=folder, timeout=500
    )
    return ran.stdout


@pytest.mark.parametrize("form", REFUSED)
def test_llm_comply(engine: Any, judges: Path, tmp_path: Path, form: str) -> None:
    model = Path(engine.scripted).with_name(NAME)
    shutil.copytree(engine.scripted, model, dirs_exist_ok=True)
    server = ["-u", engine.url + "/v1", "-k", "the-key", "-m", str(model)]
    said = judged(judges / "llm-comply", *server, "--format", form, "--json", folder=tmp_path)
    results = json.loads(said)["results"]
    failed = {each["id"]: each.get("errors") for each in results if each["status"] != "passed"}
    print(form, len(results) - len(failed), "of", len(results))
    assert failed.keys() == REFUSED[form], failed


def test_llama_benchy(engine: Any, judges: Path, book: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    judged(
        judges / "llama-benchy", "--base-url", engine.url + "/v1", "--api-key", "the-key",
        "--model", "demo", "--tokenizer", engine.scripted, "--book-url", book, "--runs", "1",
        "--pp", "128", "--tg", "16", "--concurrency", "1", "4", "--skip-coherence",
        "--exit-on-first-fail", "--format", "json", "--save-result", str(file), folder=tmp_path,
    )  # fmt: skip
    runs = json.loads(file.read_text())["benchmarks"]
    assert [run["concurrency"] for run in runs] == [1, 4]
    assert all(run["tg_throughput"]["mean"] > 0 for run in runs)


def test_tool_eval_bench(engine: Any, judges: Path, tmp_path: Path) -> None:
    """A scripted model passes no scenario; each one ends by an answer of the engine."""
    file = tmp_path / "result.json"
    judged(
        judges / "tool-eval-bench", "run", "--base-url", engine.url + "/v1", "--api-key",
        "the-key", "--model", engine.scripted, "--short", "--json-file", str(file),
        folder=tmp_path,
    )  # fmt: skip
    found = json.loads(file.read_text())
    results = found["scores"]["scenario_results"]
    assert (found["status"], len(results)) == ("completed", 15)
    assert all("final_answer=You said: " in each["raw_log"] for each in results)
