"""The program of others, by a stand-in that takes its options and writes its report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from mlx_provider.errors import NotInstalled, RequestFailed
from mlx_provider.gateway.apart import Apart
from mlx_provider.gateway.proxy import Proxy
from mlx_provider.protocol.health import ModelStatus
from mlx_provider.protocol.options import ModelOptions
from mlx_provider.registry import PluginRegistry
from mlx_provider_eval import tool_eval_bench
from mlx_provider_eval.commands import evaluate
from mlx_provider_eval.stage import Staged
from mlx_provider_eval.subjects import Subject

REPORT = {
    "tool_eval_bench_version": "3.0.0",
    "scores": {
        "total_points": 5,
        "max_points": 8,
        "category_scores": [{"label": "Tool Selection", "earned": 5, "max": 8}],
    },
}
STAND_IN = """#!{python} -SE
import json, os, sys
json.dump([sys.argv[1:], os.environ["TOOL_EVAL_API_KEY"], os.environ["NO_PROXY"], os.getcwd()],
          open({seen!r}, "w"))
print("no luck today")
if "--short" in sys.argv:
    open(sys.argv[sys.argv.index("--json-file") + 1], "w").write({report!r})
else:
    sys.exit(3)
"""
STATUS = ModelStatus(
    model="m",
    family="f",
    plugin="p",
    model_type="t",
    context_length=9,
    kv_layout="solo",
    vision=False,
    weights_bytes=1,
)


@pytest.fixture
def staged(tmp_path: Path) -> Staged:
    running: Any = SimpleNamespace(poll=lambda: None)
    engine: Any = SimpleNamespace(health=lambda: SimpleNamespace(device="a device"))
    proxy = Proxy(running, "http://127.0.0.1:9", "sk-secret", tmp_path / "log")
    return Staged(Subject("m", label="m"), "one", STATUS, ModelOptions(), Apart(proxy, engine))


def stand_in(folder: Path, report: Any = REPORT) -> str:
    path = folder / tool_eval_bench.COMMAND
    seen, written = str(folder / "seen.json"), json.dumps(report)
    path.write_text(STAND_IN.format(python=sys.executable, seen=seen, report=written))
    path.chmod(0o755)
    return tool_eval_bench.program({"PATH": str(folder)})


def test_its_points_become_a_table(staged: Staged, tmp_path: Path) -> None:
    measured = tool_eval_bench.measured(stand_in(tmp_path), ["--short"], staged, lambda: None)
    words, key, direct, folder = json.loads((tmp_path / "seen.json").read_text())
    assert words[:5] == ["run", "--base-url", staged.url, "--model", "one"]
    assert words[-1] == "--short"
    assert key == staged.key
    assert staged.key not in " ".join(words), "ps shows what stands on a command line"
    assert "127.0.0.1" in direct
    assert not Path(folder).exists(), "what it leaves lying about goes with its folder"
    result = {"subjects": [measured]}
    (table,) = tool_eval_bench.tables(result)
    assert table.rows == [["Tool Selection", "5/8"], ["all", "5/8"]]
    assert measured["report"] == REPORT


def test_its_failure_is_told(staged: Staged, tmp_path: Path) -> None:
    with pytest.raises(RequestFailed, match="ended with exit code 3: no luck today"):
        tool_eval_bench.measured(stand_in(tmp_path), [], staged, lambda: None)


def test_a_report_of_another_form_is_told(staged: Staged, tmp_path: Path) -> None:
    with pytest.raises(RequestFailed, match="a report of another form, without 'scores'"):
        tool_eval_bench.measured(stand_in(tmp_path, {"a": 1}), ["--short"], staged, lambda: None)


def test_where_it_is_missing_the_command_that_installs_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match="uv tool install tool-eval-bench"):
        tool_eval_bench.program({"PATH": str(tmp_path)})


def test_it_ends_with_us(staged: Staged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow").write_text(f"#!{sys.executable} -SE\nimport time; time.sleep(60)\n")
    (tmp_path / "slow").chmod(0o755)
    begun: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen.wait

    def wait(self: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is None and str(tmp_path) in str(self.args):
            begun.append(self)
            raise KeyboardInterrupt
        return real(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        tool_eval_bench.measured(str(tmp_path / "slow"), [], staged, lambda: None)
    assert begun[0].poll() is not None


def test_the_command_hands_on_what_follows(
    staged: Staged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("mlx_provider_eval.running.staging", lambda *_: (x for x in [staged]))
    monkeypatch.setattr("mlx_provider_eval.stage.prepare", lambda *_: None)
    arguments = ["tool-eval-bench", "demo", "--json", "--", "--short"]
    done = CliRunner().invoke(evaluate, arguments, obj=PluginRegistry(), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["subjects"][0]["points"] == [5, 8]
    refused = CliRunner().invoke(evaluate, ["tool-eval-bench", "demo", "--short"])
    assert refused.exit_code == 2
