"""The command line as a whole: what it loads, how it fails."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.main import get_group

from mlx_provider import __version__
from mlx_provider.cli import app
from mlx_provider.cli.app import build
from mlx_provider.registry.discovery import find_plugins
from named_plugins import discover
from python_process import run_python

RUN = "from mlx_provider.cli import main; main()"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit code and output, without plugins, so that nobody's broken one adds a line."""
    monkeypatch.setenv("MLX_PROVIDER_PLUGINS", "")
    monkeypatch.setattr(app, "quiet_transformers", lambda: None)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mlx-provider", *arguments])
        with pytest.raises(SystemExit) as ended:
            app.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


def test_help_imports_no_heavy_package() -> None:
    code = f"""
import atexit, sys
heavy = {{"litellm", "mlx", "mlx_lm", "mlx_vlm", "transformers", "pydantic", "uvicorn", "httpx"}}
atexit.register(lambda: print("HEAVY", sorted(heavy & sys.modules.keys())))
sys.argv = ["mlx-provider", "--help"]
{RUN}
"""
    done = run_python(code)
    assert "HEAVY []" in done.stdout
    assert "plugins" in done.stdout


def test_the_version_option_prints_the_version(run: Run) -> None:
    assert run("--version") == (0, f"{__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        pytest.param(
            ["cache", "--api-base", "engine.local"],
            "error: api_base 'engine.local' is neither",
            id="bad address",
        ),
        pytest.param(
            ["chat", "--image", "no such file.png"],
            "error: image no such file.png: No such file or directory",
            id="no image",
        ),
    ],
)
def test_our_errors_print_one_line_only(run: Run, arguments: list[str], error: str) -> None:
    code, shown, told = run(*arguments)
    assert (code, shown) == (1, "")
    (line,) = told.splitlines()
    assert line.startswith(error)


def test_wrong_usage_is_exit_code_2(run: Run) -> None:
    assert run("serve", "--port", "65536")[0] == 2


def test_the_reference_lists_every_command() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/commands.md").read_text(encoding="utf-8")
    ours = ",".join(plugin.name for plugin, _ in find_plugins() if plugin.built_in)
    cli = build(discover(ours))
    commands = set(get_group(cli).commands)
    assert commands == set(re.findall(r"^\| `mlx-provider ([\w-]+)` \|", page, re.MULTILINE))
