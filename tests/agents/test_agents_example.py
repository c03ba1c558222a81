"""The program that runs real clients, as far as it goes without them."""

import importlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "agents"
MODULES = [path.stem for path in EXAMPLE.glob("*.py") if path.stem != "__main__"]


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """Those of the example, which is a folder that Python runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        patch.setenv("BASE", "")
        patch.setenv("OPENAI_API_KEY", "")
        patch.setenv("LOOP", "")
        yield {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
        sys.modules.pop(name, None)


def test_every_client_of_the_example_is_known_to_launch(
    modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients, installed = modules["clients"], modules["installed"]
    monkeypatch.setattr(installed.Installed, "native", lambda self, pattern: tmp_path / pattern)
    monkeypatch.setattr(installed.Installed, "node", tmp_path)
    known = modules["running"].RECORDS.clients
    for agent in clients.AGENTS:
        assert agent.record in known
        assert agent.program(installed.Installed(tmp_path))
        assert "Hello" in agent.alone("Hello")
        assert re.fullmatch(r"\d+(\.\d+)+", installed.version(agent.package))


def test_every_library_is_pinned(modules: dict[str, ModuleType]) -> None:
    functions, clients = vars(modules["libraries"]), modules["python_clients"]
    for library in clients.LIBRARIES:
        assert callable(functions[library.function])
        if library.environment != "gateway":
            assert modules["installed"].version(library.package, library.environment)


def test_reuse_and_status_are_read_from_log_lines(modules: dict[str, ModuleType]) -> None:
    gateway = modules["gateway"]
    line = (
        "INFO request 0f29: tool_calls; queued 0.009 s, prefill 5 of 19 new / 1775 cached tokens, "
        "first token 0.013 s, 70 tokens, 632.1 tok/s; left the stored prefix at token 8"
    )
    (found,) = gateway.ENDED.finditer(line)
    assert (found["reason"], found["new"], found["cached"]) == ("tool_calls", "19", "1775")
    (found,) = gateway.ANSWERED.finditer('"POST /v1/messages?beta=true HTTP/1.1" 400')
    assert found["status"] == "400"


def test_the_table_has_one_row_per_client(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    outcome, table = modules["scenarios"].Outcome, modules["table"]
    merged = modules["results"].merged
    first = {"One 1.0": {"plain": outcome(True, "yes"), "tools": outcome(True, "yes")}}
    merged(tmp_path / "found.json", first | {"two (2)": {"library": outcome(True, "3 calls")}})
    rows = merged(tmp_path / "found.json", {"One 1.0": {"tools": outcome(False, "a | b")}})
    text = table.written("now", 400, rows)
    assert "| One 1.0 | yes | ✗ a \\| b | – | – | – | – | – |" in text
    assert "prefill of 400 s" in text
    assert "| two (2) | 3 calls |" in text


def test_the_committed_table_has_the_form_of_a_written_one(modules: dict[str, ModuleType]) -> None:
    """Nobody edits it by hand: each row has the columns of the command, in their order."""
    table, clients = modules["table"], modules["clients"]
    text = (EXAMPLE / "CLIENTS.md").read_text(encoding="utf-8")
    assert text.startswith(table.HEAD)
    cells = [
        [
            re.split(r" (?<!\\)\| ", line.strip("| "))
            for line in part.splitlines()
            if line[:1] == "|"
        ]
        for part in text.split("\n## ")[1:]
    ]
    agents, libraries = cells
    (prefill,) = re.findall(r"^prefill of (\d+) s$", agents[0][-1])
    columns = [each.format(prefill=float(prefill)) for each in table.COLUMNS.values()]
    assert agents[0] == ["client", *columns]
    assert libraries[0] == ["client", "tool loop"]
    for head, _, *rows in cells:
        assert rows
        assert {len(row) for row in rows} == {len(head)}
    known = {agent.name for agent in clients.AGENTS}
    assert {row[0].rpartition(" ")[0] for row in agents[2:]} == known


def test_a_cell_that_differs_from_the_committed_table_is_reported(
    modules: dict[str, ModuleType],
) -> None:
    table, outcome = modules["table"], modules["scenarios"].Outcome
    yes, no = outcome(True, "yes"), outcome(False, "no")
    rows = {"a 1": {"plain": yes, "tools": no}, "lib (1)": {"library": yes}}
    text = table.written("1", 400, rows)
    assert table.changes(text, rows) == []
    assert table.changes(text, {"a 1": {"tools": no}}) == []
    assert table.changes(text, {"a 1": {"plain": no}}) == ["a 1, answer: no"]
    assert len(table.changes(text, {"a 1": {"tools": yes}, "lib (1)": {"library": no}})) == 2


def test_an_unknown_client_is_an_error() -> None:
    command = [sys.executable, str(EXAMPLE), "--client", "Codec"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "invalid choice: 'Codec'" in done.stderr
    assert "installing" not in done.stderr


def test_sigterm_to_a_run_ends_its_gateway() -> None:
    """Proxy, engine and clients have sessions of their own, which no signal of a group reaches.

    Ctrl-C reaches the clients of a run in the background, too, whose shell has it ignored.
    """
    background = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]
    command = [*background, sys.executable, "-c", ENDED_BY_SIGNAL, str(EXAMPLE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "a client ends by SIGINT\n"
        process.terminate()
        assert process.stdout.read() == "gateway ended\n"
    assert process.returncode == 128 + signal.SIGTERM


ENDED_BY_SIGNAL = """
import contextlib, runpy, signal, subprocess, sys
folder = sys.argv.pop()
sys.path.insert(0, folder)
import gateway, installed

@contextlib.contextmanager
def waits(calls, keep):
    client = subprocess.Popen(["sleep", "100"])
    client.send_signal(signal.SIGINT)
    try:
        print("a client ends by", signal.Signals(-client.wait()).name, flush=True)
        signal.pause()
        yield
    finally:
        print("gateway ended", flush=True)

gateway.gateway = waits
installed.install = lambda folder: None
runpy.run_path(folder, run_name="__main__")
"""
