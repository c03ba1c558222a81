"""What commands say of an engine that does not run, and of what is typed into them."""

import json
import os
import pty
import sys
from pathlib import Path

import pytest
from click.testing import Result

from command_line import invoke
from python_process import run_python

RUN = "from mlx_provider.cli import main; main()"
TOLD = "no engine runs in {}: the first request starts one\n"
NO_PLUGINS = {"MLX_PROVIDER_PLUGINS": ""}


def run(folder: Path, *words: str) -> Result:
    own = {**NO_PLUGINS, "MLX_PROVIDER_RUNTIME_DIR": str(folder)}
    return invoke(*words, env=own)


@pytest.mark.parametrize(
    "words", ["engine status", "engine logs", "cache", "cache --clear", "top --once", "metrics"]
)
def test_each_command_without_an_engine_prints_engine_status(words: str, tmp_path: Path) -> None:
    done = run(tmp_path / "none", *words.split())
    outputs = [done.stdout, done.stderr]
    told = outputs.pop(1 if words == "metrics" else 0)
    assert (done.exit_code, told, *outputs) == (3, TOLD.format(tmp_path / "none"), "")


@pytest.mark.parametrize("words", ["engine status --json", "cache --json", "top --once --json"])
def test_json_output_says_that_no_engine_runs(words: str, tmp_path: Path) -> None:
    done = run(tmp_path / "none", *words.split())
    assert (done.exit_code, json.loads(done.stdout)["engine"]) == (3, "none")


@pytest.mark.parametrize("words", ["list", "down", "pull maker/model"])
def test_a_home_that_is_a_file_is_named_with_its_remedy(words: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.touch()
    own = {**os.environ, **NO_PLUGINS, "HOME": str(home), "HF_ENDPOINT": "http://127.0.0.1:9"}
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "XDG_STATE_HOME", "HF_HUB_OFFLINE"):
        own.pop(name, None)
    (line,) = run_python(RUN, *words.split(), status=1, env=own).stderr.splitlines()
    wanted = "the Hub is out of reach" if "pull" in words else f"{home} is not a folder: set HOME"
    assert wanted in line


def test_parse_in_a_terminal_prints_how_to_end_the_input_and_reads_any_text() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", RUN, "parse"])
    shown = b""
    while b"Ctrl-D" not in shown:
        shown += os.read(terminal, 1024)
    line = rb'{"chunks": ["half \ud800"], "response_format": {"type": "json_object"}}'
    os.write(terminal, line + b"\n\x04")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0


def test_warnings_of_transformers_are_not_printed(tmp_path: Path) -> None:
    """Its import warns that there is no PyTorch, unless warnings are switched off before."""
    code = (
        "import sys, mlx_provider.cli.app as app\n"
        "sys.argv = ['mlx-provider', 'plugins']\n"
        "try:\n    app.main()\nexcept SystemExit:\n    pass\n"
        "import transformers, transformers.utils.logging as told\n"
        "told.get_logger('transformers').warning('odd config')\n"
    )
    own = {name: value for name, value in os.environ.items() if "TRANSFORMERS" not in name}
    assert run_python(code, env=own).stderr == ""
