"""`pytest --mlx-conformance` as an author runs it: beside a conftest, in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_provider.testing.conformance import Collecting
from python_process import run_python

PLUGIN = """
from mlx_provider import ReasoningParser, hookimpl

@hookimpl
def mlx_reasoning_parsers():
    yield ReasoningParser("angle", "<t>", "</t>", detect=lambda template: True)
"""
TESTS = """
def test_of_the_author(pytestconfig):
    assert pytestconfig.pluginmanager.hasplugin("mlx_provider")
"""
CONFTEST = """
def pytest_mlx_conformance_models(name):
    return {}
"""


@pytest.fixture
def author(
    install_plugin: Callable[..., str], tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    install_plugin("mlx-provider-angle", PLUGIN, name="angle")
    folder = tmp_path / "author"
    folder.mkdir()
    (folder / "test_author.py").write_text(TESTS)
    (folder / "conftest.py").write_text(CONFTEST)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "XDG_STATE_HOME": str(tmp_path / "state"),
                "PYTEST_ADDOPTS": "",
            },
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_a_run_reports_its_results(author: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Items without a file, and failures in words."""
    done = author("--mlx-conformance", "angle")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 6 passed" in done.stdout
    assert "promised: `matches` and `detect` take any config" in done.stdout
    assert "found: parser 'angle' claims the chat template ''" in done.stdout
    assert "test_author" not in done.stdout


def test_an_unknown_plugin_is_an_error_with_the_known_names(pytestconfig: pytest.Config) -> None:
    with pytest.raises(pytest.UsageError, match=r"no plugin 'nope' is installed \(.*bench,"):
        Collecting(pytestconfig, ["nope"])


def test_the_pytest_plugin_imports_no_heavy_package() -> None:
    heavy = ("mlx", "litellm", "transformers", "hypothesis", "numpy", "pydantic", "httpx")
    code = (
        "import sys, mlx_provider.testing.pytest_plugin\n"
        f"print(sorted(set({heavy}) & set(sys.modules)))"
    )
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert run_python(code, env=os.environ | path).stdout == "[]\n"
